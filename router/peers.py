"""What other routers have under way and where they just sent whom: told several times a second. Pure.

Without it two routers herd, and a hot prefix is computed anew by each of them: in simulation four routers had twice the
p90 of one, and as much as one with this. A peer that has not been heard of for a second counts no longer.
May import: the standard library, msgspec, router.core, router.fleet.bookings.
"""

from collections.abc import Mapping, Sequence

import msgspec

from router.core.types import BlockKey, WorkerAddress
from router.fleet.bookings import Bookings

STALE_AFTER_S = 1.0  # at the usual pace; at a slower one after STALE_AFTER_TELLS of it
STALE_AFTER_TELLS = 4
HEARD_TTL_S = 3.0  # how long a peer's choice counts as a prediction: first tokens are not told
NOTES_MAX_BYTES = 1 << 20  # of keys in one message; what is beyond is not told
CROWDS_MAX = 256
NEWS_RATIO = 0.125  # of a prompt not known to be where it went: less is not worth telling


class WorkerLoad(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One worker's part of a router's bookings."""

    pod: str
    rank: int
    prefill_tokens: int
    inflight_requests: int
    placed_tokens: int


class Note(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request went there and much of its prompt was not known to be there; `keys` are those of all its blocks."""

    pod: str
    rank: int
    keys: bytes


class Told(msgspec.Struct, array_like=True, frozen=True):
    """One message."""

    router: bytes
    loads: list[WorkerLoad]
    crowds: list[tuple[bytes, int]]
    notes: list[Note]


class Heard(msgspec.Struct, frozen=True):
    """What to note of a peer's choice: these keys of that worker."""

    worker: WorkerAddress
    keys: list[BlockKey]


class PeersLoad(msgspec.Struct, frozen=True):
    """All fresh peers together, of one worker."""

    prefill_tokens: int = 0
    inflight_requests: int = 0
    placed_tokens: int = 0


NOBODY = PeersLoad()
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Told).decode


class Peers:
    """This router among others. Times are monotonic seconds, handed in. `router` b"": there are no others."""

    def __init__(self, router: bytes, *, interval_s: float = 0.1) -> None:
        self.router = router
        self._stale_after_s = max(STALE_AFTER_S, STALE_AFTER_TELLS * interval_s)
        self._last: dict[bytes, tuple[float, Told]] = {}
        self._notes: list[Note] = []
        self._notes_bytes = 0
        self._loads: Mapping[WorkerAddress, PeersLoad] = {}
        self._crowds: Mapping[BlockKey, int] = {}
        self._fresh_until_s = 0.0

    def chose(self, worker: WorkerAddress, keys: Sequence[BlockKey], depth: int) -> None:
        """To be told, if it is news: a request went there, where `depth` of its blocks were known to be."""
        if not self.router or not keys or len(keys) - depth < NEWS_RATIO * len(keys):
            return
        if self._notes_bytes + 8 * len(keys) <= NOTES_MAX_BYTES:
            self._notes.append(Note(worker.pod, worker.rank, b"".join(keys)))
            self._notes_bytes += 8 * len(keys)

    def tell(self, bookings: Bookings) -> bytes:
        """The message of now. Choices are told once."""
        loads = [
            WorkerLoad(w.pod, w.rank, load.prefill_tokens, load.inflight_requests, bookings.placed_tokens(w))
            for w, load in bookings.loads().items()
            if load.inflight_requests or load.placed_tokens
        ]
        crowds = sorted(((bytes(k), n) for k, n in bookings.crowds().items() if n > 1), key=lambda kn: -kn[1])
        told = Told(self.router, loads, crowds[:CROWDS_MAX], self._notes)
        self._notes, self._notes_bytes = [], 0
        return _encode(told)

    def hear(self, message: bytes, now_s: float) -> list[Heard]:
        """A peer's message, or our own come back. Raises msgspec.DecodeError for what is none."""
        told = _decode(message)
        if told.router == self.router:
            return []
        self._last[told.router] = (now_s, told)
        self._sum_up(now_s)
        return [
            Heard(WorkerAddress(n.pod, n.rank), [BlockKey(n.keys[i : i + 8]) for i in range(0, len(n.keys), 8)])
            for n in told.notes
        ]

    def load(self, worker: WorkerAddress, now_s: float) -> PeersLoad:
        """What fresh peers have on the worker."""
        self._age(now_s)
        return self._loads.get(worker, NOBODY)

    def crowd(self, key: BlockKey | None, now_s: float) -> int:
        """Requests of fresh peers whose deepest known block is `key`."""
        self._age(now_s)
        return 0 if key is None else self._crowds.get(key, 0)

    def count(self, now_s: float) -> int:
        """Fresh peers."""
        self._age(now_s)
        return len(self._last)

    def age_s(self, now_s: float) -> float:
        """How old the oldest thing is that counts: the last message of the fresh peer heard of longest ago; 0: none."""
        self._age(now_s)
        return max((now_s - at for at, _ in self._last.values()), default=0.0)

    def _age(self, now_s: float) -> None:
        if self._last and now_s > self._fresh_until_s:
            self._sum_up(now_s)

    def _sum_up(self, now_s: float) -> None:
        self._last = {r: (at, t) for r, (at, t) in self._last.items() if now_s - at <= self._stale_after_s}
        self._fresh_until_s = min((at for at, _ in self._last.values()), default=now_s) + self._stale_after_s
        loads: dict[WorkerAddress, PeersLoad] = {}
        crowds: dict[BlockKey, int] = {}
        for _, told in self._last.values():
            for x in told.loads:
                worker = WorkerAddress(x.pod, x.rank)
                had = loads.get(worker, NOBODY)
                loads[worker] = PeersLoad(
                    had.prefill_tokens + x.prefill_tokens,
                    had.inflight_requests + x.inflight_requests,
                    had.placed_tokens + x.placed_tokens,
                )
            for key, n in told.crowds:
                crowds[BlockKey(key)] = crowds.get(BlockKey(key), 0) + n
        self._loads, self._crowds = loads, crowds
