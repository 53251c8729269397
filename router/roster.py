"""Workers by model, as routing needs them: remembered between requests, because most of it rarely changes.

The cost of a choice must not grow with the fleet: beyond a few dozen workers only those are looked at that hold
something of the prompt or are among the least loaded.
May import: router.fleet, router.core, msgspec.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from router.core.types import WorkerAddress
from router.fleet.fleet import Fleet
from router.fleet.state import FleetState, Pod

REMEMBERED_S = 0.25  # a block size learnt from events changes no state: looked up again after this
ALL_LOOKED_AT = 32  # fleets up to here are looked at whole
LEAST_LOADED = 16
ORDER_GOOD_FOR_CHOICES = 16
ORDER_GOOD_FOR_S = 0.02


class KeySpace(msgspec.Struct, frozen=True):
    """Workers of one key space name the same block alike: same base model, adapter and block size."""

    model: str
    lora_name: str | None
    block_size_tokens: int


class Entry(msgspec.Struct, frozen=True):
    """One worker that serves a model. `space` None: nothing is known that a key could be made of."""

    pod: Pod
    worker: WorkerAddress
    space: KeySpace | None
    max_model_len_tokens: int | None


class Listing:
    """All workers of one model."""

    __slots__ = ("_choices", "_fleet", "_order", "_ordered_at_s", "adapter", "at_s", "by_worker", "entries", "spaces")

    def __init__(self, fleet: Fleet, model: str | None, now_s: float) -> None:
        self._fleet = fleet
        self.at_s = now_s
        pods = fleet.serving(model)
        self.entries = [_entry(fleet, pod, worker, model) for pod in pods for worker in pod.workers]
        self.adapter = next((name for pod in pods if (name := pod.lora_name(model)) is not None), None)
        self.by_worker = {e.worker: e for e in self.entries}
        self.spaces = {e.space for e in self.entries if e.space is not None}
        self._order: Sequence[Entry] = ()
        self._ordered_at_s = float("-inf")
        self._choices = 0

    def worth_a_look(self, holders: Iterable[WorkerAddress], now_s: float) -> Sequence[Entry]:
        """Those that hold something, and some of the least loaded. The order of load may be a few choices old."""
        if len(self.entries) <= ALL_LOOKED_AT:
            return self.entries
        if self._choices >= ORDER_GOOD_FOR_CHOICES or now_s - self._ordered_at_s > ORDER_GOOD_FOR_S:
            self._order = sorted(self.entries, key=self._load)[: LEAST_LOADED + ORDER_GOOD_FOR_CHOICES]
            self._ordered_at_s, self._choices = now_s, 0
        self._choices += 1
        found = {e.worker: e for e in self._order[: LEAST_LOADED + self._choices]}
        found.update((w, e) for w in holders if (e := self.by_worker.get(w)) is not None)
        return list(found.values())

    def _load(self, entry: Entry) -> tuple[int, int]:
        facts = self._fleet.facts(entry.worker)
        return facts.inflight_requests, facts.prefill_tokens


def _entry(fleet: Fleet, pod: Pod, worker: WorkerAddress, model: str | None) -> Entry:
    size, base = fleet.block_size_tokens(worker), pod.base_model(model)
    listed = pod.entry(model) if model is not None else None
    return Entry(
        pod=pod,
        worker=worker,
        space=KeySpace(base, pod.lora_name(model), size) if size and base else None,
        max_model_len_tokens=listed.max_model_len_tokens if listed else None,
    )


class Roster:
    """Listings by model name, made anew when the fleet's state changes."""

    def __init__(self, fleet: Fleet, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._clock = clock
        self._state: FleetState | None = None
        self._listings: dict[str | None, Listing] = {}

    def of(self, model: str | None) -> Listing:
        """Who serves `model` now (None: anything)."""
        now_s = self._clock()
        if self._state is not self._fleet.state:
            self._state = self._fleet.state
            self._listings.clear()
        listing = self._listings.get(model)
        if listing is None or now_s - listing.at_s > REMEMBERED_S:
            if len(self._listings) >= 1024:  # names come from clients, but only known ones get here
                self._listings.clear()
            listing = self._listings[model] = Listing(self._fleet, model, now_s)
        return listing

    def worth_a_look(self, listing: Listing, holders: Iterable[WorkerAddress], *, everybody: bool) -> Sequence[Entry]:
        """The workers that a policy is asked about; `everybody` for policies that need the whole fleet."""
        return listing.entries if everybody else listing.worth_a_look(holders, self._clock())
