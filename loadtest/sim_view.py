"""What one simulated router knows: reported blocks, its own predictions, bookings, scraped load. Pure.

The same meaning as router.route and router.index, over synthetic block names and bitmaps of pods, so that a ladder runs
in seconds; tests/sim/test_equivalence.py runs the real keys, wire and Ledger beside it and must see the same choices.
May import: the standard library, msgspec, router.core, router.policy, router.fleet.{adapters,bookings,rates}.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import cast

import msgspec

from loadtest.blocks import Event, Removed, Stored
from router.core.matching import depths
from router.core.types import BlockKey, WorkerAddress
from router.fleet.adapters import Adapters
from router.fleet.bookings import Booking, Bookings
from router.fleet.rates import PrefillRates
from router.policy.pick import Candidate

HEARD_TTL_S = 3.0
PREDICTION_TTL_S = 30.0  # as router.route: a prediction lives until first token, at most this long


class ReportedIndex:
    """Block name -> bitmap of pods, as the events have told; shared by all routers. Copies are counted per pod."""

    def __init__(self) -> None:
        self.bitmaps: dict[int, int] = {}
        self._spare: dict[tuple[int, int], int] = {}  # (pod, block) -> copies beyond the first
        self._late: deque[tuple[float, int, int, Sequence[Event]]] = deque()
        self._life: dict[int, int] = {}
        self.removed_hooks: list[RouterView] = []

    def tell(self, pod: int, events: Sequence[Event], due_s: float) -> None:
        """Events that become known at `due_s`; due times never go back."""
        self._late.append((due_s, pod, self._life.get(pod, 0), events))

    def catch_up(self, now_s: float) -> None:
        """Apply what is due."""
        late = self._late
        while late and late[0][0] <= now_s:
            _, pod, life, events = late.popleft()
            if life == self._life.get(pod, 0):
                self._apply(pod, events)

    def _apply(self, pod: int, events: Sequence[Event]) -> None:
        bit = 1 << pod
        bitmaps, spare = self.bitmaps, self._spare
        for event in events:
            if isinstance(event, Stored):
                for h in event.hashes:
                    known = bitmaps.get(h, 0)
                    if known & bit:
                        spare[pod, h] = spare.get((pod, h), 0) + 1
                    else:
                        bitmaps[h] = known | bit
            elif isinstance(event, Removed):
                self._remove(pod, bit, event.hash)
            else:
                self.forget(pod)

    def _remove(self, pod: int, bit: int, h: int) -> None:
        copies = self._spare.pop((pod, h), 0) if self._spare else 0
        if copies > 1:
            self._spare[pod, h] = copies - 1
        if copies:
            return
        left = self.bitmaps.get(h, 0) & ~bit
        if left:
            self.bitmaps[h] = left
        else:
            self.bitmaps.pop(h, None)
        for view in self.removed_hooks:
            view.unpredict(pod, h)

    def forget(self, pod: int) -> None:
        """The pod's cache is gone (restart, clear); late events of its old life do not count."""
        self._life[pod] = self._life.get(pod, 0) + 1
        bit = 1 << pod
        self.bitmaps = {h: left for h, b in self.bitmaps.items() if (left := b & ~bit)}
        self._spare = {k: n for k, n in self._spare.items() if k[0] != pod}


class Prediction(msgspec.Struct, gc=False):
    """Blocks routed to a pod and not yet known to have been reported."""

    pod: int
    hashes: Sequence[int]
    over: bool = False


class Scrape(msgspec.Struct, frozen=True, gc=False):
    """One pod's /metrics, and how many of its requests were this router's own then."""

    requests: int = 0  # running and waiting
    waiting_requests: int = 0
    kv_held_ratio: float = 0.0
    own_requests: int = 0


class Shared(msgspec.Struct, frozen=True):
    """What a router tells the others: per pod (booked prefill tokens, requests), and its crowds."""

    loads: dict[int, tuple[int, int]]
    crowds: dict[int, int]
    notes: list[Prediction]  # choices since the last time it told


class RouterView:
    """One router process. Times are handed in."""

    def __init__(self, index: ReportedIndex, *, predict: bool = True, prior_tokens_per_s: float = 20_000.0) -> None:
        self.index = index
        self.now_s = 0.0
        self.bookings = Bookings(rates=PrefillRates(prior_tokens_per_s), clock=lambda: self.now_s)
        self.adapters = Adapters(clock=lambda: self.now_s)
        self.scrapes: dict[int, Scrape] = {}
        self.others: list[Shared] = []
        self.exchanging = False
        self._predict = predict
        self._predicted: dict[int, Counter[int]] = {}  # pod -> block -> choices that say it is there
        self._ending: deque[tuple[float, Prediction]] = deque()
        self._ending_heard: deque[tuple[float, Prediction]] = deque()
        self._untold: list[Prediction] = []
        self._expiring: deque[tuple[float, Prediction]] = deque()
        index.removed_hooks.append(self)

    def matched_blocks(self, hashes: Sequence[int], live: int, now_s: float) -> dict[int, int]:
        """Depth per pod: reported or predicted, whichever reaches further."""
        self.now_s = now_s
        self.index.catch_up(now_s)
        while self._ending and self._ending[0][0] <= now_s:
            self._end(self._ending.popleft()[1])
        while self._ending_heard and self._ending_heard[0][0] <= now_s:
            self._end(self._ending_heard.popleft()[1])
        while self._expiring and self._expiring[0][0] <= now_s:
            note = self._expiring.popleft()[1]
            if not note.over:
                note.over = True
                self._end(note)
        get = self.index.bitmaps.get
        found = depths(map(get, hashes, repeat(0)), live)
        for pod, said in self._predicted.items():
            reported = found.get(pod, 0)
            if live >> pod & 1 and reported < len(hashes) and hashes[reported] in said:
                depth = next((i for i, h in enumerate(hashes) if h not in said), len(hashes))
                if depth > reported:
                    found[pod] = depth
        return found

    def predict(self, pod: int, hashes: Sequence[int], now_s: float) -> Prediction:
        """Note a choice: the blocks count as held there until `settle` says that the events have told it all."""
        note = Prediction(pod, hashes)
        if self.exchanging:
            self._untold.append(note)
        if self._predict:
            self._count(note)
            self._expiring.append((now_s + PREDICTION_TTL_S, note))
        return note

    def hear(self, told: Sequence[Shared], now_s: float) -> None:
        """What other routers told. Their choices count as predictions for a while: they tell no first tokens."""
        self.others = list(told)
        for other in told:
            for note in other.notes:
                heard = Prediction(note.pod, note.hashes, over=True)
                self._count(heard)
                self._ending_heard.append((now_s + HEARD_TTL_S, heard))

    def _count(self, note: Prediction) -> None:
        if self._predict:
            self._predicted.setdefault(note.pod, Counter()).update(note.hashes)

    def settle(self, note: Prediction, over_s: float) -> None:
        """The first token is out (or the request ended): forget the prediction at `over_s`."""
        if not note.over:
            note.over = True
            self._ending.append((over_s, note))

    def _end(self, note: Prediction) -> None:
        if not self._predict:
            return
        said = self._predicted[note.pod]
        for h in note.hashes:
            n = said.get(h, 0)
            if n > 1:
                said[h] = n - 1
            elif n:
                said.pop(h)  # Counter's own `del` is slow

    def unpredict(self, pod: int, h: int) -> None:
        """The engine evicted it: the memory goes at once."""
        if pod in self._predicted:
            self._predicted[pod].pop(h, None)

    def candidate(
        self, pod: int, worker: WorkerAddress, matched_tokens: int, rate: float, adapter: str = ""
    ) -> Candidate:
        """The pod as the policy may see it."""
        own = self.bookings.of(worker)
        prefill, requests = own.prefill_tokens, own.inflight_requests
        scrape = self.scrapes.get(pod)
        held = 0.0
        if self.exchanging:
            for other in self.others:
                load = other.loads.get(pod)
                if load is not None:
                    prefill += load[0]
                    requests += load[1]
        elif scrape is not None:
            requests += max(scrape.requests - scrape.own_requests, 0)
        if scrape is not None:
            held = scrape.kv_held_ratio
        return Candidate(
            worker=worker,
            matched_tokens=matched_tokens,
            booked_prefill_tokens=prefill,
            inflight_requests=requests,
            waiting_requests=scrape.waiting_requests if scrape is not None else 0,
            kv_held_ratio=held,
            prefill_tokens_per_s=rate,
            placed_tokens=self.bookings.placed_tokens(worker),
            adapter_s=self.adapters.delay_s(worker, adapter) if adapter else 0.0,
        )

    def crowd(self, key: int | None) -> int:
        if key is None:
            return 0
        return self.bookings.crowd(crowd_key(key)) + sum(o.crowds.get(key, 0) for o in self.others)

    def shared(self, workers: Sequence[WorkerAddress]) -> Shared:
        """What this router would tell the others now."""
        loads = {}
        for pod, worker in enumerate(workers):
            own = self.bookings.of(worker)
            if own.inflight_requests:
                loads[pod] = (own.prefill_tokens, own.inflight_requests)
        notes, self._untold = self._untold, []
        return Shared(loads, dict(cast(Mapping[int, int], self.bookings.crowds())), notes)

    def book(self, worker: WorkerAddress, *, prefill_tokens: int, prompt_tokens: int, key: int | None) -> Booking:
        return self.bookings.hold(
            worker,
            prefill_tokens=prefill_tokens,
            prompt_tokens=prompt_tokens,
            crowd_key=None if key is None else crowd_key(key),
            exact=True,
        )


def crowd_key(block: int) -> BlockKey:
    """A synthetic block name in the place of a key; any hashable does."""
    return cast(BlockKey, block)
