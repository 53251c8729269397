"""Our own connections to the pods: the `Upstream` that serves.

One protocol object a connection, one parser a reply, no task of its own. It differs from the aiohttp reference in what
can be done exactly: header bytes and targets go out as they came, a reused connection is known to be one, an idle one
is looked at before reuse, an upload that nobody reads is cut at once when its client leaves.
May import: the standard library, router.ops, router.proxy.{limits,upstream,wire}.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
from collections import deque
from typing import cast
from urllib.parse import urlsplit

from router.ops import Metrics
from router.proxy.headers import RawHeaders
from router.proxy.limits import ProxyLimits
from router.proxy.upstream import Reply, UpstreamFailed, UpstreamRequest
from router.proxy.wire import Malformed, ReplyParser

READ_HIGH_BYTES = 256 * 1024  # read ahead of the client by at most so much, then the pod is held back
WRITE_PIECE_BYTES = 256 * 1024
SWEEP_S = 1.0

Origin = tuple[bool, str, int]
"""TLS or not, host, port."""


class PodConnection(asyncio.Protocol):
    """One connection, used by one request at a time."""

    def __init__(self, pool: Pool, origin: Origin) -> None:
        self._pool = pool
        self.origin = origin
        self.transport: asyncio.Transport | None = None
        self.idle_since_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._parser: ReplyParser | None = None
        self._buffered_bytes = 0
        self._seen = False  # a byte of the present reply has come
        self._relayed = False  # its head was handed on
        self._reading = True
        self._writable = True
        self._sent_whole = False
        self._lost = False
        self._broken: UpstreamFailed | None = None
        self._waiter: asyncio.Future[None] | None = None

    # -- what the loop calls ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass of it
        _notice_dead_hosts(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:  # a pod that speaks unasked
            self.abort()
            return
        if self._broken is not None:
            return
        self._seen = True
        try:
            parser.feed(data)
        except Malformed as exc:
            self._break(UpstreamFailed("malformed", str(exc)))
            return
        if parser.surplus and not self._relayed:
            self._break(UpstreamFailed("malformed", "bytes after the end of the reply"))
            return
        self._buffered_bytes += len(data)
        if self._buffered_bytes > READ_HIGH_BYTES and self._reading and self.transport is not None:
            self._reading = False
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        return False  # close: a pod does not half-close and then go on

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._pool.forget(self)
        parser = self._parser
        if parser is None:
            return
        if self._broken is None and (exc is not None or not parser.end()) and not parser.done:
            self._break(UpstreamFailed("reset", "the connection ended before the reply did"))
        self._wake()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _break(self, failure: UpstreamFailed) -> None:
        self._broken = failure
        if self.transport is not None:
            self.transport.abort()
        self._wake()

    # -- one request --------------------------------------------------------------------------------------------------

    async def exchange(self, request: UpstreamRequest, head: bytes, *, line_max_bytes: int) -> ReplyParser:
        """Send; return when the final head is there. Raises UpstreamFailed."""
        parser = self._parser = ReplyParser(request.method, line_max_bytes=line_max_bytes)
        self._broken = None
        self._seen = self._relayed = False
        self._buffered_bytes = 0
        self._sent_whole = False
        transport = self.transport
        assert transport is not None
        if self._lost or transport.is_closing():
            raise UpstreamFailed("connect", "closed before anything was sent")
        body = request.body or b""
        if len(body) <= WRITE_PIECE_BYTES:
            transport.write(head + body if body else head)
        else:
            transport.write(head)
            await self._send_body(memoryview(body), parser)
        self._sent_whole = True
        while not parser.has_head:
            if self._broken is not None:
                raise self._broken
            if self._lost:
                raise UpstreamFailed("reset", "the connection ended before the reply did")
            await self._wait()
        if self._broken is not None:
            raise self._broken
        self._relayed = True
        return parser

    async def _send_body(self, body: memoryview, parser: ReplyParser) -> None:
        """In pieces, as fast as the pod takes them; an early reply ends the sending."""
        transport = self.transport
        assert transport is not None
        for at in range(0, len(body), WRITE_PIECE_BYTES):
            while not self._writable and not parser.has_head and self._broken is None and not self._lost:
                await self._wait()
            if parser.has_head or self._broken is not None or self._lost or transport.is_closing():
                parser.keep_alive = False  # the rest of the body is not sent: nothing else can be on this connection
                return
            transport.write(body[at : at + WRITE_PIECE_BYTES])

    @property
    def nothing_seen(self) -> bool:
        """Not one byte of a reply has come."""
        return not self._seen

    def read_nowait(self, parser: ReplyParser) -> bytes | None:
        """See Reply.read_nowait."""
        body = parser.body
        if body:
            data = body[0] if len(body) == 1 else b"".join(body)
            body.clear()
            self._buffered_bytes = 0
            self._read_on()
            return data
        if parser.done:
            return b""
        if self._broken is not None:
            raise self._broken
        if self._lost:
            raise UpstreamFailed("reset", "the connection ended before the reply did")
        self._read_on()
        return None

    async def read(self, parser: ReplyParser) -> bytes:
        """See Reply.read."""
        while (data := self.read_nowait(parser)) is None:
            await self._wait()
        return data

    def _read_on(self) -> None:
        if not self._reading and self.transport is not None:
            self._reading = True
            self.transport.resume_reading()

    def finish(self) -> None:
        """The request is over: back to the pool if the reply was read to its end, else broken at once."""
        parser = self._parser
        assert parser is not None
        whole = parser.done and not parser.body and parser.keep_alive and not parser.surplus and self._sent_whole
        self._parser = None
        if whole and self._broken is None and not self._lost and self._reading:
            self._pool.give_back(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Break the connection now, unsent bytes included."""
        if self.transport is not None:
            self.transport.abort()

    def is_quiet(self) -> bool:
        """Open, and nothing to read: neither a close nor a byte has come while it was idle."""
        transport = self.transport
        if transport is None or self._lost or transport.is_closing():
            return False
        poller = select.poll()
        try:
            poller.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
            return not poller.poll(0)
        except (OSError, ValueError):
            return False


class PodReply:
    """See Reply. Apart from its connection, which serves others once this is closed."""

    __slots__ = ("_connection", "_parser", "delimited_by_close", "headers", "reason", "status")

    def __init__(self, connection: PodConnection, parser: ReplyParser) -> None:
        self._connection: PodConnection | None = connection
        self._parser = parser
        self.status = parser.status
        self.reason = parser.reason
        self.headers: RawHeaders = parser.headers
        self.delimited_by_close = parser.delimited_by_close

    async def read(self) -> bytes:
        """See Reply.read."""
        if self._connection is None:
            return b""
        return await self._connection.read(self._parser)

    def read_nowait(self) -> bytes | None:
        """See Reply.read_nowait."""
        return b"" if self._connection is None else self._connection.read_nowait(self._parser)

    def close(self) -> None:
        """See Reply.close."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.finish()


class Pool:
    """See Upstream. Idle connections are kept per origin, the youngest is used first."""

    def __init__(self, limits: ProxyLimits, metrics: Metrics, *, ssl_context: ssl.SSLContext | None = None) -> None:
        self._limits = limits
        self._new = metrics.upstream_connections.labels(kind="new")
        self._reused = metrics.upstream_connections.labels(kind="reused")
        self._ssl = ssl_context
        self._idle: dict[Origin, deque[PodConnection]] = {}
        self._open: set[PodConnection] = set()
        self._origins: dict[str, tuple[Origin, str, bytes]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        metrics.pod_connections.set_function(lambda: len(self._open))

    async def send(self, request: UpstreamRequest, *, fresh: bool = False) -> Reply:
        """See Upstream.send."""
        origin, prefix, host = self._origin(request.url)
        connection = None if fresh else self._take(origin)
        reused = connection is not None
        if connection is None:
            connection = await self._connect(origin)
        (self._reused if reused else self._new).inc()
        head = _head(request, prefix, host)
        try:
            parser = await connection.exchange(request, head, line_max_bytes=self._limits.reply_header_max_bytes)
        except UpstreamFailed as exc:
            ambiguous = exc.kind == "reset" and reused and connection.nothing_seen
            connection.finish()
            if ambiguous:
                raise UpstreamFailed("ambiguous", exc.detail) from None
            raise
        except BaseException:
            connection.finish()
            raise
        return PodReply(connection, parser)

    def _origin(self, url: str) -> tuple[Origin, str, bytes]:
        known = self._origins.get(url)
        if known is None:
            parts = urlsplit(url)
            tls = parts.scheme == "https"
            origin = (tls, parts.hostname or "", parts.port or (443 if tls else 80))
            if len(self._origins) > 4096:
                self._origins.clear()
            known = self._origins[url] = (origin, parts.path.rstrip("/"), parts.netloc.encode())
        return known

    def _take(self, origin: Origin) -> PodConnection | None:
        idle = self._idle.get(origin)
        oldest_s = asyncio.get_running_loop().time() - self._limits.pod_keepalive_s
        while idle:
            connection = idle.pop()
            if connection.idle_since_s > oldest_s and connection.is_quiet():
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin) -> PodConnection:
        tls, host, port = origin
        context = (self._ssl or _default_tls()) if tls else None
        try:
            async with asyncio.timeout(self._limits.connect_limit_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: PodConnection(self, origin), host, port, ssl=context
                )
        except (OSError, ssl.SSLError, TimeoutError, UnicodeError) as exc:
            raise UpstreamFailed("connect", type(exc).__name__) from None
        self._open.add(connection)
        return connection

    def give_back(self, connection: PodConnection) -> None:
        """The reply was read to its end."""
        if self._closed:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.setdefault(connection.origin, deque()).append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(SWEEP_S, self._sweep)

    def forget(self, connection: PodConnection) -> None:
        """It has closed."""
        self._open.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is not None and connection in idle:
            idle.remove(connection)

    def _sweep(self) -> None:
        self._sweeper = None
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - self._limits.pod_keepalive_s
        for origin, idle in list(self._idle.items()):
            while idle and idle[0].idle_since_s <= oldest_s:
                idle.popleft().abort()
            if not idle:
                del self._idle[origin]
        if self._idle:
            self._sweeper = loop.call_later(SWEEP_S, self._sweep)

    async def close(self) -> None:
        """See Upstream.close."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # let the loop close the sockets


def _head(request: UpstreamRequest, prefix: str, host: bytes) -> bytes:
    """The request's head; the same bytes as the client's where they are passed on."""
    target = (prefix + request.target).encode("utf-8", "surrogateescape")
    lines = [request.method.encode(), b" ", target, b" HTTP/1.1\r\nHost: ", host, b"\r\n"]
    for name, value in request.headers:
        lines += (name, b": ", value, b"\r\n")
    if request.body is not None:
        lines.append(b"Content-Length: %d\r\n" % len(request.body))
    lines.append(b"\r\n")
    return b"".join(lines)


def _notice_dead_hosts(sock: socket.socket | None) -> None:
    """A node that lost its power sends nothing, not even a reset: let the kernel find out within half a minute."""
    if sock is None:
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", 15),
            ("TCP_KEEPINTVL", 5),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 30_000),
        ):
            if hasattr(socket, name):  # not on every system
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_tls: list[ssl.SSLContext] = []


def _default_tls() -> ssl.SSLContext:
    if not _tls:
        _tls.append(ssl.create_default_context())
    return _tls[0]
