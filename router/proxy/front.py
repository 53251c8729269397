"""The side that faces clients: aiohttp's low-level server with our limits, and replies that are passed on as they came.

The low-level `web.Server` and not an `Application`: one handler sees every method and path as it was received, nothing
is inflated, redirected or routed on the way, and it costs less CPU a request.
aiohttp's own error pages (plain text, 400 for long headers, a traceback in the log for every malformed request) are
replaced here. May import: aiohttp, router.door, router.ops, router.proxy.{errors,headers,limits}.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import HttpVersion10, HttpVersion11
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from router.door import error_object
from router.ops import Metrics
from router.proxy.errors import HttpError
from router.proxy.limits import ProxyLimits

log = logging.getLogger("router.proxy")

LINGER_S = 2.0  # a refused upload is read on so long, so that its sender sees the answer
HEAD_LINES_MAX = 4  # longest lines that a whole head may have the size of

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Connection(RequestHandler):
    """One client's connection: aiohttp's protocol with a limit on the head's time and with our errors."""

    __slots__ = ("_front", "_head_bytes", "_head_timer", "_peer", "_refused", "_used")

    def __init__(self, front: Front) -> None:
        limits = front.limits
        super().__init__(
            front,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=limits.client_idle_limit_s,
            access_log=None,  # type: ignore[arg-type]  # aiohttp takes None for "no log" and types it otherwise
            logger=log,
            max_line_size=limits.request_header_max_bytes,
            max_field_size=limits.request_header_max_bytes,
            max_headers=limits.request_headers_max,
            lingering_time=LINGER_S,
            auto_decompress=False,
        )
        self._front = front
        self._head_bytes = 0  # of a head that is not complete; below 0: it was too long
        self._head_timer: asyncio.TimerHandle | None = None
        self._peer = ""
        self._refused = False
        self._used = False  # a request has come

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        self._peer = peer[0] if isinstance(peer, tuple) else ""
        reason = self._front.admit(self._peer)
        if reason is not None:
            self._refused = True
            cast(asyncio.Transport, transport).abort()  # uvloop's transports are no subclass of it
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_head_timer()
        if not self._refused and self._front.leaves(self._peer):
            self._refused = True  # counted once
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_bytes < 0:
            return  # refused already, read on so that its sender sees the answer and no reset
        super().data_received(data)
        if self._busy():
            self._stop_head_timer()
            self._head_bytes, self._used = 0, True
            return
        if self._used and self._waiter is None:
            return  # the rest of a body that nobody wants: no head is waited for
        limits = self._front.limits
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_LINES_MAX * limits.request_header_max_bytes:
            self._head_too_long()
        elif self._head_timer is None and data:  # idle, and the head is not complete yet
            self._head_timer = self._loop.call_later(limits.request_head_limit_s, self._head_too_slow)

    def _busy(self) -> bool:
        """A request is being answered, or waits for it. (On a fresh connection nobody awaits one yet.)"""
        return bool(self._messages) or self._current_request is not None

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_long(self) -> None:
        """Each line is within its limit, but there are too many of them to be kept."""
        self._head_bytes = -1
        self._stop_head_timer()
        self._head_timer = self._loop.call_later(LINGER_S, self.force_close)
        if self.transport is not None and not self.transport.is_closing():
            text = error_object(431, "The request's headers are larger than this router takes.")
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\n"
            self.transport.write(b"%bContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (head, len(text), text))

    def _head_too_slow(self) -> None:
        self._head_timer = None
        if not self._busy():
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """A malformed request, or a fault of our own in a handler: a JSON error, one log line, no client text in it."""
        if status == 400:
            log.info("malformed request", extra={"fields": {"error": type(exc).__name__}})
            error = _malformed(exc)
        else:
            log.error("fault in the router", exc_info=exc)
            error = HttpError(500, "The router failed; this is its fault, not the request's.", close=True)
        if request.writer.output_size > 0:  # a part of a reply has gone out: only a break is honest now
            raise ConnectionResetError("reply already begun")
        return error.response()


def _malformed(exc: BaseException | None) -> HttpError:
    if isinstance(exc, LineTooLong) or "Too many" in str(exc):
        return HttpError(431, "The request's headers are larger than this router takes.", close=True)
    return HttpError(400, "The request is not valid HTTP/1.1.", code="malformed_http", close=True)


class Front(web.Server):
    """Makes a Connection for every client; counts and bounds them."""

    def __init__(self, handler: Handler, limits: ProxyLimits, metrics: Metrics) -> None:
        super().__init__(handler, handler_cancellation=True)  # a client that leaves cancels its handler at once (H08)
        self.limits = limits
        self._metrics = metrics
        self._open: Counter[str] = Counter()
        self._open_total = 0
        metrics.client_connections.set_function(lambda: self._open_total)
        self._empty: asyncio.Event | None = None

    def __call__(self) -> RequestHandler:
        return Connection(self)

    async def idle(self, grace_s: float) -> bool:
        """Wait until no client is connected, at most `grace_s`; True when it came to that."""
        self._empty = asyncio.Event()
        if not self.connections:
            return True
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def admit(self, peer: str) -> str | None:
        """Count a new connection; a reason when it must be closed instead."""
        limits = self.limits
        reason = None
        if limits.connections_max and self._open_total >= limits.connections_max:
            reason = "connections_max"
        elif limits.connections_per_client and self._open[peer] >= limits.connections_per_client:
            reason = "connections_per_client"
        if reason is not None:
            self._metrics.connections_refused.labels(reason=reason).inc()
            return reason
        self._open[peer] += 1
        self._open_total += 1
        return None

    def leaves(self, peer: str) -> bool:
        """A counted connection is over."""
        self._open[peer] -= 1
        if self._open[peer] <= 0:
            del self._open[peer]
        self._open_total -= 1
        if self._empty is not None and self._open_total == 0:
            self._empty.set()
        return True


class RelayResponse(web.StreamResponse):
    """A pod's reply on its way to the client: its headers exactly, plus the framing of this connection."""

    def __init__(self, status: int, reason: str, headers: list[tuple[bytes, bytes]]) -> None:
        super().__init__(status=status, reason=reason)
        self._raw = headers
        self.broken = False

    async def _start(self, request: web.BaseRequest) -> AbstractStreamWriter:
        self._req = request
        writer = self._payload_writer = request._payload_writer
        # As write_headers() does, but with the bytes as they came; they go out with the first bytes of the body.
        writer._headers_buf = self._head(request, writer)  # type: ignore[attr-defined]
        writer._headers_written = False  # type: ignore[attr-defined]
        return writer

    def send_head(self) -> None:
        """Do not wait for the body's first bytes."""
        if self._payload_writer is not None:
            self._payload_writer.send_headers()

    def _head(self, request: web.BaseRequest, writer: AbstractStreamWriter) -> bytes:
        version = request.version
        keep_alive = request.keep_alive and self._keep_alive is not False
        names = {name.lower() for name, _ in self._raw}
        lines = [f"HTTP/{version.major}.{version.minor} {self._status} ".encode(), _reason(self._reason), b"\r\n"]
        empty = request.method == "HEAD" or self._status in (204, 304)
        for name, value in self._raw:
            if name.lower() == b"content-length" and self._status == 204:
                continue
            lines += (name, b": ", value, b"\r\n")
        if b"date" not in names:
            lines += (b"Date: ", rfc822_formatted_time().encode(), b"\r\n")
        if not empty and b"content-length" not in names:
            if version >= HttpVersion11:
                writer.enable_chunking()
                lines.append(b"Transfer-Encoding: chunked\r\n")
            else:
                keep_alive = False
        self._keep_alive = keep_alive
        if not keep_alive and version >= HttpVersion11:
            lines.append(b"Connection: close\r\n")
        elif keep_alive and version == HttpVersion10:
            lines.append(b"Connection: keep-alive\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    @property
    def delimited_by_close(self) -> bool:
        """The client can tell the end from a break only by how the connection ends."""
        writer = self._payload_writer
        return writer is not None and not writer.chunked and all(n.lower() != b"content-length" for n, _ in self._raw)  # type: ignore[attr-defined]

    async def write_eof(self, data: bytes = b"") -> None:
        """End the reply; a broken one is left without its end, so that no client can take it for whole (H03)."""
        if self._eof_sent:
            return
        self._eof_sent = True
        if not self.broken and self._payload_writer is not None:
            await self._payload_writer.write_eof(data)
        self._req = None
        self._payload_writer = None

    def break_off(self) -> None:
        """No clean end: what was written is flushed, then the connection closes in the middle of the body."""
        self.send_head()
        self.broken = True
        self._keep_alive = False
        request = self._req
        if request is not None and self.delimited_by_close and request.transport is not None:
            _reset_on_close(request.transport)


class ClientGone(web.StreamResponse):
    """Returned by a handler whose client has left: nothing is written and the connection ends, without a traceback."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        raise ConnectionResetError("the client has left")


def _reason(reason: str) -> bytes:
    return reason.encode("latin-1", "replace")  # as it was decoded


def _reset_on_close(transport: asyncio.Transport) -> None:
    """Make closing send RST: without length or chunks a plain FIN would look like a whole reply."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Listener:
    """A Front bound to a port."""

    def __init__(self, front: Front, runner: web.ServerRunner, port: int) -> None:
        self.front = front
        self.port = port
        self._runner = runner

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Stop accepting; give open requests `grace_s`, then cut them."""
        await self.stop_accepting()
        await self.front.idle(grace_s)
        await self.front.shutdown(1.0)
        await self._runner.cleanup()

    async def stop_accepting(self) -> None:
        """Close the port and idle connections; open requests go on and are the last on theirs."""
        for site in list(self._runner.sites):
            await site.stop()
        await asyncio.sleep(0)
        self.front.pre_shutdown()


async def listen(
    front: Front,
    *,
    host: str,
    port: int,
    ssl_context: ssl.SSLContext | None = None,
    reuse_port: bool = False,
    sock: socket.socket | None = None,
) -> Listener:
    """Serve `front` at host:port (0: a free one; see `Listener.port`). Raises OSError."""
    runner = web.ServerRunner(front, handle_signals=False)
    await runner.setup()
    site: Any
    if sock is not None:
        site = web.SockSite(runner, sock, ssl_context=ssl_context, backlog=2048)
    else:
        site = web.TCPSite(runner, host, port, ssl_context=ssl_context, reuse_port=reuse_port or None, backlog=2048)
    try:
        await site.start()
    except OSError:
        await runner.cleanup()
        raise
    return Listener(front, runner, runner.addresses[0][1])
