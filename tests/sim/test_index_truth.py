"""Whatever happens in between, the index ends up saying what the pods hold, and leaves nothing behind."""

import contextlib
from typing import Any

import pytest

from indexer.consumer import Consumer
from indexer.plan import AskReplay, Ledger
from router.core.types import IndexOp, IndexUnavailable
from router.index.memory import MemoryIndex
from tests.sim.world import World


@pytest.mark.parametrize("seed", range(200))
def test_the_index_tells_the_truth(seed: int) -> None:
    World(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(2, 22))
def test_the_index_tells_the_truth_in_many_worlds(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        World(seed).run(steps=150)


# -- faults put into the code on purpose: each must be caught within some seeds ---------------------


def counting_like_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal forgets the block though a copy is left."""
    right = Ledger._remove_copy

    def wrong(self: Ledger, name: int, shift: int, tier: Any) -> None:
        part = self._blocks[name >> 58]
        i = part.find(name)
        while i >= 0 and (part.counts[i] >> shift) & 0xFFFF > 1:
            part.counts[i] -= 1 << shift
        right(self, name, shift, tier)

    monkeypatch.setattr(Ledger, "_remove_copy", wrong)


def trusting_a_reconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reconnect only the numbers are compared, not what was published under them."""
    right = Ledger.replayed

    def wrong(self: Ledger, seq: int, batch: Any, digest: int = 0) -> list[IndexOp] | AskReplay:
        return right(self, seq, batch, self.last_digest if seq == self.last_seq else digest)

    monkeypatch.setattr(Ledger, "replayed", wrong)


def losing_what_could_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations are gone when the store could not take them."""

    async def wrong(self: Consumer) -> None:
        ops, self._pending, self._pending_blocks = self._pending, [], 0
        if ops and self._worker is not None and not self._renew:
            with contextlib.suppress(IndexUnavailable):
                await self._writer.apply(self._worker, ops)

    monkeypatch.setattr(Consumer, "_write_pending", wrong)


def giving_slots_unswept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is given to the next worker while old bits still stand."""
    right = MemoryIndex._retire

    def wrong(self: MemoryIndex, address: Any) -> None:
        right(self, address)
        self._retired_mask = 0

    monkeypatch.setattr(MemoryIndex, "_retire", wrong)


def filling_a_gap_with_hope(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap that replay could not fill is passed over instead of forgetting."""

    def wrong(self: Ledger) -> list[IndexOp]:
        self.last_seq += 1
        self.last_digest = 0
        return []

    monkeypatch.setattr(Ledger, "give_up", wrong)


@pytest.mark.parametrize(
    "fault",
    [
        counting_like_a_set,
        trusting_a_reconnect,
        losing_what_could_not_be_written,
        giving_slots_unswept,
        filling_a_gap_with_hope,
    ],
)
def test_a_fault_on_purpose_is_caught(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        all_worlds(1000)  # ends at the first that shows it; what is lost is often made good by a later restart


def all_worlds(seeds: int = 200) -> None:
    for seed in range(seeds):
        World(seed).run()
