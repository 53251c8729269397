"""One worker's KV events over ZMQ: subscribe, notice reconnects, ask for replay. Moves bytes, decodes nothing.

Every connection is a socket of its own (libzmq's own reconnecting is off): a restarted engine is another connection, so
its messages cannot be taken for the old one's. The receive loop only receives; what is too much is dropped and counted,
and shows as a gap. May import: pyzmq, msgspec, router.core.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from router.core.types import WorkerAddress

_END = b"\xff" * 8
_Plain = zmq.Socket[bytes]  # without asyncio's futures: what is there is taken in the step that learns of it
_SLICE = 64  # messages taken before others get a turn
_OVER = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class SourceSpec(msgspec.Struct, frozen=True):
    """Where one rank of a pod publishes. `model` is the base model id (`root` of /v1/models)."""

    address: WorkerAddress
    model: str
    events: str
    replay: str | None = None


def rank_specs(pod: str, model: str, events: str, replay: str | None = None, ranks: int = 1) -> list[SourceSpec]:
    """One spec a data-parallel rank: vLLM publishes rank r on port + r, for both endpoints."""
    return [
        SourceSpec(WorkerAddress(pod, r), model, at_rank(events, r), at_rank(replay, r) if replay else None)
        for r in range(ranks)
    ]


def at_rank(endpoint: str, rank: int) -> str:
    """tcp://host:5557 -> tcp://host:5558 for rank 1. Raises ValueError when there is no port to count from."""
    if not rank:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    head, _, port = endpoint.rpartition(":")
    if not head or not port.isdigit():
        raise ValueError(f"{endpoint} has no port; rank {rank} publishes on port + {rank}")
    return f"{head}:{int(port) + rank}"


class Live(msgspec.Struct, frozen=True, gc=False):
    """A published message of one connection."""

    connection: int
    seq: int
    payload: bytes


class Connected(msgspec.Struct, frozen=True, gc=False):
    """A connection is up: every later Live of this number belongs to it."""

    connection: int


class Dropped(msgspec.Struct, frozen=True, gc=False):
    """Messages were lost here because the queue was full."""


Item = Live | Connected | Dropped


class ReplayFailed(Exception):
    """No complete answer: no endpoint, nobody there, or silence in the middle."""


class Inbox:
    """What was received and not yet learnt; bounded in messages and bytes. One producer, one consumer.

    `taker` is offered each item that would be the only one here; it says whether it took it.
    """

    taker: Callable[[Item], bool] | None = None

    def __init__(self, max_messages: int = 100_000, max_bytes: int = 64 << 20) -> None:
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._some = asyncio.Event()
        self.dropped_messages = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Never waits. A Live that finds no room is dropped; the hole is marked once."""
        if not self._items and self.taker is not None and self.taker(item):
            return
        if isinstance(item, Live):
            if len(self._items) >= self._max_messages or self._bytes + len(item.payload) > self._max_bytes:
                self.dropped_messages += 1
                if not (self._items and isinstance(self._items[-1], Dropped)):
                    self._items.append(Dropped())
                return
            self._bytes += len(item.payload)
        self._items.append(item)
        self._some.set()

    async def get(self) -> Item:
        """The oldest item. Gives nobody else a turn while there are some."""
        while not self._items:
            self._some.clear()
            await self._some.wait()
        item = self._items.popleft()
        if isinstance(item, Live):
            self._bytes -= len(item.payload)
        return item


class SourceTimes(msgspec.Struct, frozen=True):
    """Waits, in seconds."""

    connect_s: float = 5.0
    backoff_first_s: float = 0.1
    backoff_max_s: float = 1.0
    heartbeat_s: float = 5.0
    replay_silence_s: float = 3.0  # vLLM looks for replay requests once per publisher loop


class Source:
    """The subscription of one worker, and its replay."""

    def __init__(
        self,
        spec: SourceSpec,
        inbox: Inbox,
        context: zmq.asyncio.Context,
        times: SourceTimes = SourceTimes(),  # noqa: B008  frozen
        *,
        on_malformed: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec, self.connected, self.connections = spec, False, 0
        self.last_error: str | None = None
        self._inbox, self._context, self._times, self._on_malformed = inbox, context, times, on_malformed
        self._over: asyncio.Future[None] | None = None  # done when the connection has ended

    def reconnect(self) -> None:
        """Give this connection up for a new one: what comes through it is of a process that is gone."""
        self._end()

    async def run(self) -> None:
        """Connect, receive, connect again, until cancelled."""
        pause_s = self._times.backoff_first_s
        while True:
            was_up = False
            try:
                was_up = await self._one_connection()
            except zmq.ZMQError as exc:
                self.last_error = f"{self.spec.events}: {exc.strerror or exc}"
            finally:
                self.connected = False
            pause_s = self._times.backoff_first_s if was_up else min(2 * pause_s, self._times.backoff_max_s)
            await asyncio.sleep(pause_s * random.uniform(0.7, 1.3))

    async def _one_connection(self) -> bool:
        """Until it ends. True if it was up."""
        loop = asyncio.get_running_loop()
        sub: _Plain = zmq.Socket(self._context, zmq.SUB)
        monitor: _Plain = zmq.Socket(self._context, zmq.PAIR)
        over = self._over = loop.create_future()

        def look() -> None:
            if over.done():
                return
            try:
                if self._look(sub, monitor):
                    loop.call_soon(look)
            except Exception as exc:  # whoever runs this connection is told, not the loop
                over.set_exception(exc)

        try:
            _bounded(sub, self._times)
            sub.setsockopt(zmq.RECONNECT_IVL, -1)
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            monitor_at = f"inproc://monitor.{id(over)}"
            sub.monitor(monitor_at, _OVER | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            monitor.connect(monitor_at)
            sub.connect(self.spec.events)
            self.connections += 1
            for socket in (sub, monitor):
                loop.add_reader(socket.FD, look)
            try:
                loop.call_soon(look)  # libzmq tells each change once, perhaps before we listened
                with _later(loop, self._times.connect_s, self._too_late):
                    await over
            finally:
                for socket in (sub, monitor):
                    loop.remove_reader(socket.FD)
            return self.connected
        finally:
            sub.disable_monitor()
            monitor.close(linger=0)
            sub.close(linger=0)

    def _look(self, sub: _Plain, monitor: _Plain) -> bool:
        """Take what is there, in the step in which the loop learnt of it. True if there may be more."""
        for event in _monitor_events(monitor):
            if event & zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected, self.last_error = True, None
                self._inbox.put(Connected(self.connections))
            elif event & _OVER:
                if self.connected:
                    self._take(sub, self.connections)  # what is left over after a slice is lost: replay has it
                else:
                    self.last_error = f"{self.spec.events}: cannot connect"
                self._end()
                return False
        return self.connected and self._take(sub, self.connections)

    def _too_late(self) -> None:
        if not self.connected:
            self.last_error = f"{self.spec.events}: no ZMQ handshake within {self._times.connect_s:g} s"
            self._end()

    def _end(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _take(self, sub: _Plain, number: int) -> bool:
        """Receive what is there, at most a slice. True if there may be more."""
        for _ in range(_SLICE):
            try:
                frames = sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            if len(frames) == 3 and len(frames[1]) == 8:
                self._inbox.put(Live(number, int.from_bytes(frames[1], "big"), frames[2]))
            else:
                self._on_malformed()
        return True

    async def replay(self, from_seq: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Every batch the engine still has from `from_seq` on, with its number. Raises ReplayFailed."""
        if self.spec.replay is None:
            raise ReplayFailed("no replay endpoint")
        dealer = self._context.socket(zmq.DEALER)
        try:
            _bounded(dealer, self._times)
            dealer.connect(self.spec.replay)
            async with asyncio.timeout(self._times.connect_s):
                await dealer.send_multipart([b"", max(from_seq, 0).to_bytes(8, "big")])
            plain: _Plain = zmq.Socket.shadow(dealer.underlying)
            while await dealer.poll(round(1000 * self._times.replay_silence_s)):
                for _ in range(_SLICE):
                    try:
                        frames = plain.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    if len(frames) < 3 or len(frames[-2]) != 8:  # ["", seq, payload], or ["", topic, seq, payload]
                        self._on_malformed()
                        continue
                    if frames[-2] == _END:
                        return
                    yield int.from_bytes(frames[-2], "big"), frames[-1]
                await asyncio.sleep(0)
            raise ReplayFailed(f"{self.spec.replay}: silent for {self._times.replay_silence_s:g} s")
        except (zmq.ZMQError, TimeoutError) as exc:
            raise ReplayFailed(f"{self.spec.replay}: {exc or 'cannot connect'}") from None
        finally:
            dealer.close(linger=0)


@contextlib.contextmanager
def _later(loop: asyncio.AbstractEventLoop, delay_s: float, call: Callable[[], None]) -> Iterator[None]:
    handle = loop.call_later(delay_s, call)
    try:
        yield
    finally:
        handle.cancel()


def _bounded(socket: _Plain | zmq.asyncio.Socket, times: SourceTimes) -> None:
    """Room for a whole replay buffer (libzmq's default is 1,000 messages), and an end to every wait."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 200_000)
    socket.setsockopt(zmq.MAXMSGSIZE, 64 << 20)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, round(1000 * times.connect_s))
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * times.connect_s))
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * times.heartbeat_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(3000 * times.heartbeat_s))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    with contextlib.suppress(zmq.ZMQError):
        socket.setsockopt(zmq.IPV6, 1)


def _monitor_events(monitor: _Plain) -> list[int]:
    events = []
    while True:
        try:
            events.append(int(parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]))
        except zmq.Again:
            return events
