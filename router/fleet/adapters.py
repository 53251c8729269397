"""Which LoRA adapters a worker has at hand, and how long one would wait there. Pure; the clock is handed in.

vLLM keeps `max_loras` adapters on the GPU, the least recently used makes room. A request whose adapter is not there
waits until all requests of one that is have ended; loading then holds up the whole engine. /metrics names only adapters
that have requests now, so which idle ones are still there is worked out from what this router sent and saw used.
May import: the standard library, router.core.
"""

import time
from collections.abc import Callable, Collection, Sequence

from router.core.types import Clock, WorkerAddress

LOAD_S = 0.5  # a rank-16 adapter of an 8B model from a local disk takes 0.1 to 1 s
TENURE_PRIOR_S = 5.0  # how long an adapter keeps its slot, until the first have been seen to give theirs back
TENURE_WEIGHT = 0.05  # of the newest in the moving mean
UNKNOWN_MAX = 16  # adapters remembered of a worker that has not said how many slots it has
EVICTING_LOADS = 2.0  # whose adapter makes room will want it back: one more loading


class _Slots:
    """One life of one worker."""

    __slots__ = ("foreign", "foreign_until_s", "inflight", "max_loras", "recent")

    def __init__(self) -> None:
        self.max_loras: int | None = None  # None: not known, so nothing is said of waiting
        self.inflight: dict[str, tuple[int, float]] = {}  # own adapters: requests, since when; oldest first
        self.foreign: Collection[str] = ()  # adapters in use by others, as last scraped
        self.foreign_until_s = 0.0
        self.recent: dict[str, None] = {}  # believed to be on the GPU, least recently used first

    def touch(self, adapter: str) -> None:
        self.recent.pop(adapter, None)
        self.recent[adapter] = None
        excess = len(self.recent) - (self.max_loras or UNKNOWN_MAX)
        if excess > 0:
            idle = [name for name in self.recent if name not in self.inflight and name not in self.foreign]
            for name in idle[:excess]:
                del self.recent[name]


class Adapters:
    """All workers' adapters. A pod without LoRA costs nothing here: it is never asked about."""

    def __init__(self, *, load_s: float = LOAD_S, clock: Clock = time.monotonic) -> None:
        self.load_s = load_s
        self._clock = clock
        self._slots: dict[WorkerAddress, _Slots] = {}
        self._tenure_s = TENURE_PRIOR_S

    def hold(self, worker: WorkerAddress, adapter: str) -> Callable[[], None]:
        """A request of the adapter goes to the worker; call what is returned, once, when it has ended."""
        slots = self._of(worker)
        count, since_s = slots.inflight.get(adapter, (0, self._clock()))
        slots.inflight[adapter] = (count + 1, since_s)
        slots.touch(adapter)

        def release() -> None:
            count, since_s = slots.inflight[adapter]
            if count > 1:
                slots.inflight[adapter] = (count - 1, since_s)
                return
            self._tenure_s += TENURE_WEIGHT * (self._clock() - since_s - self._tenure_s)
            slots.touch(adapter)
            del slots.inflight[adapter]

        return release

    def in_flight(self, worker: WorkerAddress) -> Collection[str]:
        """Adapters of this router's own requests there, for `scraped` afterwards."""
        slots = self._slots.get(worker)
        return () if slots is None else tuple(slots.inflight)

    def scraped(
        self,
        worker: WorkerAddress,
        *,
        max_loras: int,
        running: Sequence[str],
        waiting: Sequence[str],
        own: Collection[str],
        valid_s: float,
    ) -> None:
        """What /metrics said. `own`: what this router itself had there when it asked; valid for so long."""
        slots = self._of(worker)
        slots.max_loras = max_loras
        slots.foreign = {n for n in (*running, *waiting) if n not in own and n not in slots.inflight}
        slots.foreign_until_s = self._clock() + valid_s
        for name in running:
            slots.touch(name)

    def delay_s(self, worker: WorkerAddress, adapter: str) -> float:
        """Seconds that a request of the adapter costs there beyond one whose adapter is on the GPU: its wait for a
        slot, the loading, and another's loading anew when that has to make room."""
        slots = self._slots.get(worker)
        if slots is None or slots.max_loras is None:
            return 0.0
        ahead = slots.foreign if self._clock() < slots.foreign_until_s else ()
        if adapter in ahead:
            return 0.0
        before = [*ahead, *slots.inflight]
        place = before.index(adapter) if adapter in slots.inflight else len(before)
        loaded = adapter in slots.recent
        turns = place + 1 - slots.max_loras
        if turns > 0:
            return turns * self._tenure_s / slots.max_loras + EVICTING_LOADS * self.load_s
        if loaded:
            return 0.0
        return self.load_s if len(slots.recent) < slots.max_loras else EVICTING_LOADS * self.load_s

    def status(self, worker: WorkerAddress) -> dict[str, object] | None:
        """For /debug/pods; None: the worker has said nothing of adapters."""
        slots = self._slots.get(worker)
        if slots is None or slots.max_loras is None:
            return None
        return {"max_loras": slots.max_loras, "in_flight": list(slots.inflight), "loaded": list(slots.recent)}

    def retire(self, worker: WorkerAddress) -> None:
        """This life of the worker is over; requests still open are released on its old counts."""
        self._slots.pop(worker, None)

    def _of(self, worker: WorkerAddress) -> _Slots:
        slots = self._slots.get(worker)
        if slots is None:
            slots = self._slots[worker] = _Slots()
        return slots
