"""Connections to Redis with bounds: every call has a deadline, none can read another's reply, waits are bounded.

A deadline is on Redis, not on us: when it fires, the loop looks at its sockets once more, and a reply that came while
we stood still counts. Commands are packed by hiredis (four times faster than redis-py's own packing). An unread reply
can never be taken for the next one: the connection of a call that was given up is used again only after its reply has
been read and dropped, that of a call that failed never. (Closing both made a late lookup cost the next one a new
connection, five more round trips to the server that was slow.)
May import: redis, hiredis, router.core, router.settings (its error).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import hiredis
from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError

from router.core.types import IndexUnavailable
from router.settings import SettingsError

Command = tuple[bytes | str | int, ...]
_DRAIN_S = 1.0  # how long a reply that nobody waits for any longer is waited for
_NOTICE_DEAD_HOSTS = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_TURNS = 3  # of the loop: sockets are looked at, whoever waits for them is told, it reads


class Link:
    """At most `max_connections` to one Redis. Raises SettingsError for a URL that cannot be used."""

    def __init__(self, url: str, *, max_connections: int, connect_s: float = 2.0) -> None:
        self._pool = _pool(url, connect_s)
        self._room = asyncio.Semaphore(max_connections)
        self._idle: list[AbstractConnection] = []
        self._open: set[AbstractConnection] = set()
        self._draining: set[asyncio.Task[None]] = set()
        self._max_draining = max_connections

    async def call(self, *commands: Command, deadline_s: float) -> list[Any]:
        """The replies, in order. Raises IndexUnavailable; a script that is not there raises NoScriptError."""
        packed = b"".join([hiredis.pack_command(c) for c in commands])
        waiting = True
        try:
            async with within(deadline_s), self._room:
                waiting = False
                return await self._on_a_connection(packed, len(commands))
        except TimeoutError:
            raise IndexUnavailable("busy" if waiting else "deadline") from None

    async def _on_a_connection(self, packed: bytes, replies: int) -> list[Any]:
        while True:
            reused = bool(self._idle)
            conn = self._idle.pop() if reused else self._new()
            self._open.add(conn)
            got: list[Any] = []
            well = sent = given_up = False
            try:
                if not reused:
                    await _connect(conn)
                await conn.send_packed_command(packed, check_health=False)
                sent = True
                while len(got) < replies:
                    got.append(await conn.read_response(disconnect_on_error=False))
                well = True
                return got
            except asyncio.CancelledError:
                given_up = sent and len(self._draining) < self._max_draining
                raise
            except NoScriptError:
                well = replies == 1
                raise
            except (RedisConnectionError, OSError) as exc:
                if not reused:
                    raise IndexUnavailable("connection", words(exc)) from exc
                # closed while idle: once more on another; everything here may be told twice
            except (ResponseError, RedisError) as exc:  # READONLY, LOADING, OOM, MOVED, NOAUTH, a broken reply, ...
                raise IndexUnavailable("reply", words(exc)) from exc
            finally:
                if well:
                    self._idle.append(conn)
                elif given_up:
                    task = asyncio.create_task(self._drain(conn, replies - len(got)), name="redis-late-reply")
                    self._draining.add(task)
                    task.add_done_callback(self._draining.discard)
                else:
                    await self._close(conn)

    async def _drain(self, conn: AbstractConnection, replies: int) -> None:
        """Read what nobody waits for any longer; then the connection is as good as any."""
        well = False
        try:
            async with asyncio.timeout(_DRAIN_S):
                for _ in range(replies):
                    with contextlib.suppress(ResponseError):
                        await conn.read_response(disconnect_on_error=False)
            well = True
        except (RedisError, OSError, TimeoutError):
            pass
        finally:
            if well:
                self._idle.append(conn)
            else:
                await self._close(conn)

    async def run(
        self, script: Script, keys: Sequence[bytes], args: Sequence[bytes | str | int], deadline_s: float
    ) -> Any:
        """One script by its digest; loaded where it is not known yet."""
        try:
            return (await self.call(("EVALSHA", script.sha, len(keys), *keys, *args), deadline_s=deadline_s))[0]
        except NoScriptError:
            return (await self.call(("EVAL", script.text, len(keys), *keys, *args), deadline_s=deadline_s))[0]

    async def connection(self) -> AbstractConnection:
        """One of its own, for a subscription. The caller gives it to `drop`."""
        conn = self._new()
        self._open.add(conn)
        try:
            await _connect(conn)
        except BaseException:
            await self._close(conn)
            raise
        return conn

    async def drop(self, conn: AbstractConnection) -> None:
        """Close a connection."""
        await self._close(conn)

    async def close(self) -> None:
        """Close all."""
        for task in self._draining:
            task.cancel()
        await asyncio.gather(*self._draining, return_exceptions=True)
        self._idle.clear()
        for conn in list(self._open):
            await self._close(conn)

    def _new(self) -> AbstractConnection:
        conn: AbstractConnection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        return conn

    async def _close(self, conn: AbstractConnection) -> None:
        self._open.discard(conn)
        await conn.disconnect(nowait=True)


def _pool(url: str, connect_s: float) -> ConnectionPool:
    """What the URL says after its `?` counts, but for what this file relies on."""
    ours: dict[str, Any] = {
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": None,
        "retry": Retry(NoBackoff(), 0),
    }
    if not url.startswith("unix://"):  # a subscription only listens: a host that has died would never be noticed
        known = {getattr(socket, name): n for name, n in _NOTICE_DEAD_HOSTS.items() if hasattr(socket, name)}
        ours |= {"socket_keepalive": True, "socket_keepalive_options": known}
    try:
        pool = ConnectionPool.from_url(url, socket_connect_timeout=connect_s)
        pool.connection_kwargs.update(ours)
        pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, RedisError):  # whose texts may quote the password
        raise SettingsError(
            "--redis-url cannot be used: is each option after its `?` one of redis-py's, and is the password "
            "percent-encoded (/ is %2F, # is %23, ? is %3F, @ is %40)?"
        ) from None
    return pool


async def _connect(conn: AbstractConnection) -> None:
    """The name is for the operator's CLIENT LIST; an ACL that forbids to give one is no reason not to work."""
    await conn.connect()  # type: ignore[no-untyped-call]
    await conn.send_command("CLIENT", "SETNAME", "warmroute")
    with contextlib.suppress(ResponseError):
        await conn.read_response(disconnect_on_error=False)


def words(exc: Exception) -> str:
    """What Redis or the system says, without the arguments of a command that it does not know."""
    return f"{type(exc).__name__}: {exc}".partition(", with args")[0][:200]


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """As asyncio.timeout, but what has come by then is taken: a loop that stood still runs its timers first."""
    loop = asyncio.get_running_loop()
    handle: asyncio.Handle
    async with asyncio.timeout(None) as limit:

        def turn(left: int) -> None:
            nonlocal handle
            if left:
                handle = loop.call_soon(turn, left - 1)
            else:
                limit.reschedule(loop.time())

        handle = loop.call_later(seconds, turn, _TURNS)
        try:
            yield
        finally:
            handle.cancel()


class Script:
    """A Lua script and its digest."""

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
