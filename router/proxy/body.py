"""A request's body, whole and as it was sent: bounded in size, in time and in number held at once.

The body is kept until a pod has taken it, so that it can be sent again. Compressed bodies stay compressed.
May import: aiohttp.web, router.proxy.{errors,limits}.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from aiohttp import web
from aiohttp.http import HttpVersion11

from router.proxy.errors import HttpError
from router.proxy.limits import ProxyLimits


class BodyLedger:
    """How many bytes of bodies are held now."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0

    def hold(self) -> HeldBody:
        """A holder for one request's body; leaving it gives the bytes back."""
        return HeldBody(self)


class HeldBody:
    """One request's body for as long as it may have to be sent again. A context manager."""

    __slots__ = ("_bytes", "_ledger", "body")

    def __init__(self, ledger: BodyLedger) -> None:
        self._ledger = ledger
        self._bytes = 0
        self.body: bytes | None = None

    def add(self, size_bytes: int) -> bool:
        """Count more bytes; False when all bodies together are too many."""
        if self._ledger.held_bytes + size_bytes > self._ledger.max_bytes:
            return False
        self._ledger.held_bytes += size_bytes
        self._bytes += size_bytes
        return True

    def replace(self, body: bytes) -> bool:
        """Hold this instead; False when all bodies together are too many."""
        if not self.add(len(body) - self._bytes):
            return False
        self.body = body
        return True

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        """Let go of the body. Idempotent."""
        self._ledger.held_bytes -= self._bytes
        self._bytes = 0
        self.body = None


async def read_body(request: web.BaseRequest, limits: ProxyLimits, held: HeldBody) -> bytes | None:
    """The whole body; None when the request has none (no length, no chunks). Raises HttpError."""
    if not request.body_exists:
        return b"" if request.headers.get("Content-Length") == "0" else None
    if any(coding.strip().lower() != "chunked" for coding in request.headers.getall("Transfer-Encoding", ())):
        raise HttpError(  # its coding would be lost on the way, and the pod would read gzip as JSON
            400, "The only Transfer-Encoding that is read here is chunked.", code="malformed_http", close=True
        )
    announced = request.content_length
    if announced is not None and announced > limits.request_max_bytes:
        raise _too_large(limits)
    content = request.content
    whole = content.is_eof() and content.exception() is None  # the usual case: it came along with the head
    await _answer_expect(request, waits=not whole)
    if whole:
        return _counted(content.read_nowait(), limits, held)
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(limits.request_body_idle_limit_s):
                chunk = await content.readany()
        except TimeoutError:
            raise HttpError(408, "The request's body stopped coming.", close=True) from None
        except ConnectionError:
            raise
        except Exception as exc:  # aiohttp's payload errors have no common public base
            raise HttpError(400, "The request's body is not valid HTTP.", code="malformed_http", close=True) from exc
        if not chunk:
            break
        size += len(chunk)
        if size > limits.request_max_bytes:
            raise _too_large(limits)
        parts.append(_counted(chunk, limits, held))
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _counted(chunk: bytes, limits: ProxyLimits, held: HeldBody) -> bytes:
    """The chunk, if all bodies together may hold it. Raises HttpError(413, 429)."""
    if len(chunk) > limits.request_max_bytes:
        raise _too_large(limits)
    if held.add(len(chunk)):
        return chunk
    raise too_many(limits)


def too_many(limits: ProxyLimits) -> HttpError:
    """What to say when HeldBody takes no more."""
    message = "The router holds too many request bodies; try again."
    return HttpError(429, message, retry_after_s=limits.retry_after_s, close=True)


def _too_large(limits: ProxyLimits) -> HttpError:
    return HttpError(413, f"The request's body is larger than {limits.request_max_bytes} bytes.", close=True)


async def _answer_expect(request: web.BaseRequest, *, waits: bool) -> None:
    """`Expect: 100-continue`: the client waits for this line before it sends its body."""
    expect = request.headers.get("Expect")
    if expect is None or request.version < HttpVersion11:
        return
    if expect.lower() != "100-continue":
        raise HttpError(417, "The only expectation that is met here is 100-continue.", close=True)
    if not waits:
        return
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0
