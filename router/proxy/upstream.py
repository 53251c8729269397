"""The port towards the pods: send one request, give back head and body as they come, classify what went wrong.

`Upstream` never retries, never follows a redirect, keeps no cookies, inflates nothing. Exceptions of HTTP libraries
quote URLs and raw status lines, so none of their text leaves this file (DESIGN 14).
May import: aiohttp, msgspec, router.policy.retry, router.proxy.{headers,limits}, router.ops.
"""

from __future__ import annotations

import io
import ssl
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Protocol

import aiohttp
import msgspec
from aiohttp import payload
from aiohttp.helpers import sentinel
from multidict import CIMultiDict
from yarl import URL

from router.ops import Metrics
from router.policy.retry import FailureKind
from router.proxy.headers import RawHeaders
from router.proxy.limits import ProxyLimits


class UpstreamRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for a pod, ready to be written."""

    method: str
    url: str  # base URL of the pod, no trailing slash
    target: str  # path and query exactly as the client sent them
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes | None  # None: no body and no Content-Length


class UpstreamFailed(Exception):
    """The pod gave no usable reply, or broke off in the middle of one. `detail` quotes nothing that was received."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class Reply(Protocol):
    """A pod's reply: the head has arrived, the body comes by `read`."""

    status: int
    reason: str
    headers: RawHeaders
    delimited_by_close: bool  # neither a length nor chunks: its end cannot be told from a break

    async def read(self) -> bytes:
        """The next bytes as they came, b"" at the end. Raises UpstreamFailed."""
        ...

    def read_nowait(self) -> bytes | None:
        """What `read` would give without waiting; None when it would wait. Raises UpstreamFailed."""
        ...

    def close(self) -> None:
        """Give the connection back if the reply was read to its end, else break it at once. Idempotent."""
        ...


class Upstream(Protocol):
    """Connections to all pods."""

    async def send(self, request: UpstreamRequest, *, fresh: bool = False) -> Reply:
        """Send and wait for the final head (1xx are swallowed). Raises UpstreamFailed.

        `fresh`: on a new connection. Cancelling breaks the connection.
        """
        ...

    async def close(self) -> None:
        """Break every connection."""
        ...


class AiohttpUpstream:
    """The reference implementation, over aiohttp's client."""

    def __init__(self, limits: ProxyLimits, metrics: Metrics, *, ssl_context: ssl.SSLContext | None = None) -> None:
        self._limits = limits
        self._metrics = metrics
        self._ssl: ssl.SSLContext | bool = ssl_context if ssl_context is not None else True
        self._pooled: aiohttp.ClientSession | None = None
        self._single: aiohttp.ClientSession | None = None

    async def send(self, request: UpstreamRequest, *, fresh: bool = False) -> Reply:
        """See Upstream.send."""
        trace = SimpleNamespace(reused=False)
        data = None
        if request.body is not None:
            data = payload.BytesIOPayload(io.BytesIO(request.body)) if len(request.body) > 65536 else request.body
        try:
            response = await self._session(fresh).request(
                request.method,
                URL(request.url + request.target, encoded=True),
                headers=CIMultiDict(
                    (k.decode("utf-8", "surrogateescape"), v.decode("utf-8", "surrogateescape"))
                    for k, v in request.headers
                ),
                data=data,
                allow_redirects=False,
                trace_request_ctx=trace,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as exc:
            raise UpstreamFailed("connect", type(exc).__name__) from None
        except aiohttp.ServerDisconnectedError as exc:
            seen = not isinstance(exc.message, str) or exc.message != "Server disconnected"
            raise UpstreamFailed(_broken(reused=trace.reused and not seen), "closed before a reply") from None
        except (aiohttp.ClientOSError, ConnectionError) as exc:
            raise UpstreamFailed(_broken(reused=trace.reused), f"{type(exc).__name__} before a reply") from None
        except aiohttp.ClientError as exc:
            raise UpstreamFailed("malformed", type(exc).__name__) from None
        self._metrics.upstream_connections.labels(kind="reused" if trace.reused else "new").inc()
        if not 200 <= response.status <= 599:
            response.close()
            raise UpstreamFailed("malformed", "status out of range")
        return AiohttpReply(response, request.method)

    def _session(self, fresh: bool) -> aiohttp.ClientSession:
        if self._pooled is None or self._single is None:
            self._pooled, self._single = self._open(force_close=False), self._open(force_close=True)
        return self._single if fresh else self._pooled

    def _open(self, *, force_close: bool) -> aiohttp.ClientSession:
        limits = self._limits
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_mark_reused)
        connector = aiohttp.TCPConnector(
            limit=0,
            limit_per_host=0,
            ttl_dns_cache=10,
            force_close=force_close,
            ssl=self._ssl,
            keepalive_timeout=sentinel if force_close else limits.pod_keepalive_s,
        )
        session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_limit_s),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            max_line_size=limits.reply_header_max_bytes,
            max_field_size=limits.reply_header_max_bytes,
            max_headers=256,
            trace_configs=[tracing],
        )
        session._retry_connection = False  # H12: the router alone decides on retries
        return session

    async def close(self) -> None:
        """See Upstream.close."""
        for session in (self._pooled, self._single):
            if session is not None:
                await session.close()
        self._pooled = self._single = None


async def _mark_reused(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    context.trace_request_ctx.reused = True


def _broken(*, reused: bool) -> FailureKind:
    return "ambiguous" if reused else "reset"


class AiohttpReply:
    """See Reply."""

    def __init__(self, response: aiohttp.ClientResponse, method: str) -> None:
        self._response = response
        self.status = response.status
        self.reason = response.reason or ""
        self.headers: RawHeaders = response.raw_headers
        names = {name.lower() for name, _ in response.raw_headers}
        empty = method == "HEAD" or response.status in (204, 304)
        self.delimited_by_close = not empty and b"content-length" not in names and b"transfer-encoding" not in names

    def read_nowait(self) -> bytes | None:
        """See Reply.read_nowait."""
        content = self._response.content
        if content.exception() is not None:
            return None  # read() says what it is
        return content.read_nowait() or (b"" if content.at_eof() else None)

    async def read(self) -> bytes:
        """See Reply.read."""
        try:
            return await self._response.content.readany()
        except aiohttp.ClientPayloadError as exc:
            malformed = "not completed" not in str(exc)
            raise UpstreamFailed("malformed" if malformed else "reset", "broke off in the body") from None
        except (aiohttp.ClientError, ConnectionError) as exc:
            raise UpstreamFailed("reset", f"{type(exc).__name__} in the body") from None
        except TimeoutError:
            raise UpstreamFailed("timeout", "silent in the body") from None

    def close(self) -> None:
        """See Reply.close."""
        self._response.close()
