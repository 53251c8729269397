"""One run twice: with synthetic names and bitmaps, and with real token ids, keys, wire bytes, Ledger, MemoryIndex and
LocalView. The simulator's short cuts are allowed only because both make the same choices.
"""

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from indexer.plan import AskReplay, Ledger
from indexer.wire import decode
from loadtest import workload
from loadtest.blocks import Event, Removed, Stored
from loadtest.engine import Request, request_from_tokens
from loadtest.profile import Profile, load_profile
from loadtest.sim_policies import FACTORIES
from loadtest.sim_view import Prediction, ReportedIndex, RouterView
from loadtest.sim_world import Setup, Simulation, _Flight
from loadtest.workload import Turn, Workload, token_ids
from router.core.hashing import chain_keys, pack_tokens, root_key
from router.core.types import BlockKey, WorkerAddress, WorkerId
from router.index.local import LocalView
from router.index.memory import MemoryIndex

SEED, MODEL = "installation", "tiny/model"
ROOT = root_key(seed=SEED, model=MODEL)


def done(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine that never waits."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


def to_wire(events: Sequence[Event]) -> bytes:
    """A batch as vLLM 0.32 sends it."""
    rows: list[dict[str, Any]] = []
    for e in events:
        if isinstance(e, Stored):
            rows.append(
                {
                    "type": "BlockStored", "block_hashes": list(e.hashes), "parent_block_hash": e.parent,
                    "token_ids": list(e.token_ids), "block_size": e.block_size_tokens, "lora_id": None, "medium": "GPU",
                    "lora_name": e.lora_name,
                }
            )  # fmt: skip
        elif isinstance(e, Removed):
            rows.append({"type": "BlockRemoved", "block_hashes": [e.hash], "medium": "GPU"})
        else:
            rows.append({"type": "AllBlocksCleared"})
    return msgspec.msgpack.encode([0.0, rows, 0])


class RealIndex(ReportedIndex):
    """Wire bytes -> Ledger -> MemoryIndex. No event carries our keys."""

    def __init__(self, pods: int) -> None:
        super().__init__()
        self.memory = MemoryIndex()
        self.ledgers = [Ledger(seed=SEED, model=MODEL) for _ in range(pods)]
        self.lives = [WorkerId(WorkerAddress(f"pod-{i:04d}"), "1") for i in range(pods)]
        self.seqs = [0] * pods
        for life in self.lives:
            done(self.memory.register(life))

    def _apply(self, pod: int, events: Sequence[Event]) -> None:
        told = self.ledgers[pod].receive(self.seqs[pod], decode(to_wire(events)))
        assert not isinstance(told, AskReplay)
        self.seqs[pod] += 1
        done(self.memory.apply(self.lives[pod], told))


class RealView(RouterView):
    """Keys, the index's answer and the local view as router.route puts them together."""

    def __init__(self, index: RealIndex, keys: Mapping[int, BlockKey], world: "RealSimulation") -> None:
        super().__init__(index)
        self.real, self.keys, self.world = index, keys, world
        self.local = LocalView(clock=lambda: world.now_s)
        index.memory.listen(self.local)

    def matched_blocks(self, hashes: Sequence[int], live: int, now_s: float) -> dict[int, int]:
        self.now_s = now_s
        self.index.catch_up(now_s)
        keys = [self.keys[h] for h in hashes]
        found = {w: held.gpu for w, held in self.real.memory.holders_now(keys).items()}
        for worker, depth in self.local.holders(keys).items():
            found[worker] = max(found.get(worker, 0), depth)
        numbers = {life.address: i for i, life in enumerate(self.real.lives)}
        return {numbers[w]: depth for w, depth in found.items()}

    def predict(self, pod: int, hashes: Sequence[int], now_s: float) -> Prediction:
        self.local.note(self.real.lives[pod].address, [self.keys[h] for h in hashes], ttl_s=30.0)
        return Prediction(pod, hashes)

    def settle(self, note: Prediction, over_s: float) -> None:
        if not note.over:
            note.over = True
            keys = [self.keys[h] for h in note.hashes]
            self.local.note(self.real.lives[note.pod].address, keys, ttl_s=self.world.setup.settle_s)


class RealSimulation(Simulation):
    """The same world with real token ids throughout."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        self.keys: dict[int, BlockKey] = {}
        super().__init__(*args, **kw)

    def _make_index(self) -> ReportedIndex:
        return RealIndex(self.setup.pods)

    def _make_view(self) -> RouterView:
        assert isinstance(self._index, RealIndex)
        return RealView(self._index, self.keys, self)

    def _hashes(self, turn: Turn, has_more: bool) -> list[int]:
        hashes = list(self.spelt(turn, 0).hashes)
        packed = pack_tokens(token_ids((*turn.prompt, turn.answer)))
        self.keys.update(zip(hashes, chain_keys(ROOT, packed, self.setup.profile.block_size_tokens), strict=True))
        return hashes

    def spelt(self, turn: Turn, number: int) -> Request:
        size = self.setup.profile.block_size_tokens
        return request_from_tokens(number, token_ids(turn.prompt), token_ids((turn.answer,)), size)

    def _request(self, request_id: int, flight: _Flight) -> Request:
        return self.spelt(flight.turn, request_id)


def profile() -> Profile:
    return msgspec.structs.replace(load_profile("qwen3-32b-2xh100"), num_blocks=160)


LOADS = {
    "shared": lambda: workload.shared_prefix(
        1, rate=12, seconds=15, groups=12, prefix_tokens=1000, question_tokens=150, output_tokens=70, zipf=0.8
    ),
    "chat": lambda: workload.chat(
        2, rate=3, seconds=12, system_tokens=300, first_tokens=200, next_tokens=150, output_tokens=100, think_s=1.0
    ),
    "bursts": lambda: workload.bursts(
        3, siblings=12, every_s=2, seconds=50, prefix_tokens=700, question_tokens=90, output_tokens=40
    ),
}


@pytest.mark.parametrize("load", sorted(LOADS))
@pytest.mark.parametrize("event_lag_s", [0.0, 0.3])
def test_short_cuts_and_the_real_thing_choose_alike(load: str, event_lag_s: float) -> None:
    built: Workload = LOADS[load]()
    setup = Setup(profile=profile(), pods=3, event_lag_s=event_lag_s)
    short = Simulation(setup, built, FACTORIES["prefix"](), 1).run().stages[0].samples
    world = RealSimulation(setup, built, FACTORIES["prefix"](), 1)
    real = world.run().stages[0].samples
    assert [(s.pod, s.predicted_tokens) for s in real] == [(s.pod, s.predicted_tokens) for s in short]
    assert [(s.cached_tokens, s.first_s, s.finished_s) for s in real] == [
        (s.cached_tokens, s.first_s, s.finished_s) for s in short
    ]
    assert sum(s.cached_tokens for s in real) > 0
    check_contents(world)


def check_contents(world: RealSimulation) -> None:
    """The index holds what the pods' own pools hold, key for key."""
    index = world._index
    assert isinstance(index, RealIndex)
    index.catch_up(world.now_s + 10.0)
    for pod, ledger in zip(world._pods, index.ledgers, strict=True):
        truth = {world.keys[h] for h in pod.engine._pool.hash_of if h is not None}
        assert set(ledger.claims("gpu")) == truth
    evictions = sum(p.engine._pool.usable_blocks for p in world._pods)
    assert len(world.keys) > evictions, "more blocks than room, so evictions happened"
