"""The fast engine against the plain one, step by step, in random worlds with little memory; and its invariants."""

from collections import Counter
from random import Random

import msgspec
import pytest

from indexer.plan import AskReplay, Ledger
from indexer.wire import decode
from loadtest.engine import Cleared, Engine, Removed, Request, StepResult, Stored
from loadtest.profile import Profile, load_profile
from router.core.hashing import next_key, pack_tokens, root_key
from router.core.types import Add, BlockKey, Remove
from tests.sim.reference_engine import ReferenceEngine
from tests.sim.test_equivalence import to_wire

FAST_SEEDS = range(60)
ALL_SEEDS = range(60, 500)


def small_profile(rng: Random) -> Profile:
    """Little of everything, so that evictions, preemptions and chunks happen all the time."""
    seqs = rng.choice([2, 4, 8, 16])
    return msgspec.structs.replace(
        load_profile("laptop-toy"),
        block_size_tokens=rng.choice([1, 2, 4, 16]),
        num_blocks=rng.choice([40, 80, 160]),
        max_num_seqs=seqs,
        max_num_batched_tokens=rng.choice([seqs, 32, 64, 256]) if seqs <= 32 else 256,
        max_model_len_tokens=100_000,
        frontend_s=rng.choice([0.0, 0.01]),
    )


def random_request(rng: Random, number: int, profile: Profile, chains: list[list[int]]) -> Request:
    """A prompt that begins as one of a few chains do; its answer may be named, so that others find it."""
    bs = profile.block_size_tokens
    room = (profile.num_blocks - 1) * bs
    prompt = rng.randint(1, max(room // 3, 1))
    output = rng.randint(1, max(min(room // 3, 60), 1))
    base = rng.choice(chains)
    keep = rng.randint(0, min(len(base), prompt // bs))
    named = rng.randint(prompt // bs, (prompt + output) // bs)
    hashes = (base[:keep] + [rng.getrandbits(60) for _ in range(named)])[:named]
    if rng.random() < 0.3:
        chains.append(hashes)
    return Request(number, prompt, output, hashes, skip_cache_read=rng.random() < 0.05)


class World:
    """Both engines fed alike. `step` compares them and replays the events into a plain count of copies."""

    def __init__(self, seed: int, adapters: int = 0) -> None:
        self.rng = Random(seed)
        self.profile = small_profile(self.rng)
        self.adapters = adapters
        if adapters:
            self.profile = msgspec.structs.replace(self.profile, max_loras=1 + seed % 3, lora_load_s=0.05)
        self.loads = self.passed_over = 0
        self.lora_chains: dict[str, list[list[int]]] = {}
        self.fast = Engine(self.profile, seed=0)
        self.plain = ReferenceEngine(self.profile)
        self.chains: list[list[int]] = [[self.rng.getrandbits(60) for _ in range(60)] for _ in range(3)]
        self.now_s = 0.0
        self.sent = 0
        self.live: set[str | int] = set()
        self.told: Counter[int] = Counter()
        self.ledger = Ledger(seed="s", model="m")
        self.keys: dict[int, BlockKey] = {}
        self.claimed: set[BlockKey] = set()
        self.batches = 0
        self.firsts: Counter[str | int] = Counter()
        self.preempted = self.evicted = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.rng.random() < 0.35:
                self.submit()
            if self.live and self.rng.random() < 0.03:
                self.abort(self.rng.choice(sorted(self.live, key=str)))
            if self.rng.random() < 0.02:
                assert self.fast.reset() == self.plain.reset()
            self.step()
        while self.live:
            self.step()
        assert self.fast.next_step_s(self.now_s) is None
        assert self.fast.gauges().kv_usage_ratio == 0.0

    def submit(self) -> None:
        chains, name = self.chains, None
        if self.adapters and self.rng.random() < 0.8:  # an adapter's blocks are its own
            name = f"ad{self.rng.randrange(self.adapters)}"
            chains = self.lora_chains.setdefault(name, [[self.rng.getrandbits(60) for _ in range(60)]])
        request = random_request(self.rng, self.sent, self.profile, chains)
        request.lora_name = name
        self.sent += 1
        self.fast.submit(request, self.now_s)
        self.plain.submit(request, self.now_s)
        self.live.add(request.id)

    def abort(self, request_id: str | int) -> None:
        assert self.fast.abort(request_id)
        self.plain.abort(request_id)
        self.live.discard(request_id)

    def step(self) -> None:
        at = self.fast.next_step_s(self.now_s)
        if at is not None:
            self.now_s = at
        mine, theirs = self.fast.step(self.now_s), self.plain.step(self.now_s)
        if mine is None:
            assert theirs is None
            return
        assert theirs is not None
        self.compare(mine, theirs)
        self.check_slots()
        self.replay(mine)
        self.check_pool()
        self.now_s = mine.ends_s

    def compare(self, mine: StepResult, theirs: StepResult) -> None:
        assert mine.first == theirs.first
        assert mine.finished == theirs.finished
        assert mine.preempted == theirs.preempted
        assert Counter(map(str, mine.events)) == Counter(map(str, theirs.events))
        assert (mine.prefill_tokens, mine.decode_sequences) == (theirs.prefill_tokens, theirs.decode_sequences)
        assert mine.ends_s == pytest.approx(theirs.ends_s, rel=1e-9)

    def through_the_ledger(self, result: StepResult) -> None:
        """The same events with token ids of their own, as wire bytes, through the Ledger that serves."""
        size = self.profile.block_size_tokens
        wire = []
        for event in result.events:
            if isinstance(event, Stored):
                ids = [[h & 0xFFFFFFFF, *[h >> 32] * (size - 1)] for h in event.hashes]
                root = root_key(seed="s", model="m", lora_name=event.lora_name)
                parent = root if event.parent is None else self.keys[event.parent]
                for h, block in zip(event.hashes, ids, strict=True):
                    parent = self.keys[h] = next_key(parent, pack_tokens(block))
                event = msgspec.structs.replace(event, token_ids=[t for block in ids for t in block])
            wire.append(event)
        told = self.ledger.receive(self.batches, decode(to_wire(wire)))
        assert not isinstance(told, AskReplay)
        self.batches += 1
        for op in told:
            if isinstance(op, Add):
                self.claimed.update(op.keys)
            elif isinstance(op, Remove):
                self.claimed.difference_update(op.keys)
            else:
                self.claimed.clear()

    def replay(self, result: StepResult) -> None:
        if result.events:
            self.through_the_ledger(result)
        for event in result.events:
            match event:
                case Stored():
                    self.told.update(event.hashes)
                case Removed():
                    self.told[event.hash] -= 1
                    self.evicted += 1
                    assert self.told[event.hash] >= 0
                case Cleared():
                    self.told.clear()
        for first in result.first:
            self.firsts[first.id] += 1
        self.preempted += len(result.preempted)
        self.live.difference_update(result.finished)

    def check_slots(self) -> None:
        """Running adapters have slots, there are no more than there may be, and both engines loaded the same."""
        fast, running = self.fast, Counter(s.request.lora_name for s in self.fast._running.values())
        del running[None]
        assert fast._lora_running == (running if self.adapters else Counter())
        assert set(fast._lora_running) <= set(fast._lora_slots)
        assert len(fast._lora_slots) <= self.profile.max_loras
        assert list(fast._lora_slots) == self.plain.slots
        self.loads = self.plain.loads
        assert fast.gauges().running_adapters == tuple(fast._lora_running)
        self.passed_over += any(fast._has_no_slot(seq) for seq in fast._waiting)

    def check_pool(self) -> None:
        """No block is lost or doubly free, no count is negative, the table is what the events said."""
        pool = self.fast._pool
        held = Counter(b for seq in self.fast._running.values() for b in seq.blocks)
        assert {b: n for b, n in enumerate(pool.refs) if n} == dict(held)
        assert set(pool.free) | set(held) == set(range(1, self.profile.num_blocks))
        assert not set(pool.free) & set(held)
        truth = Counter(h for h in pool.hash_of if h is not None)
        assert truth == +self.told
        assert self.claimed == {self.keys[h] for h in truth}
        table = {h: [c] if isinstance(c, int) else list(c) for h, c in pool.table.items()}
        assert {h: len(c) for h, c in table.items()} == dict(truth)


@pytest.mark.parametrize("seed", FAST_SEEDS)
def test_the_fast_engine_is_the_plain_engine(seed: int) -> None:
    world = World(seed)
    world.run(steps=120)
    assert max(world.firsts.values(), default=1) == 1, "a first token comes once"


@pytest.mark.parametrize("seed", range(20))
def test_the_fast_engine_is_the_plain_engine_with_adapters(seed: int) -> None:
    world = World(seed, adapters=5)
    world.run(steps=120)
    assert world.loads > 3, "adapters come and go"
    assert world.passed_over > 3 or world.profile.max_loras > 1, "requests wait for a slot"


@pytest.mark.slow
@pytest.mark.parametrize("seed", ALL_SEEDS)
def test_the_fast_engine_is_the_plain_engine_thoroughly(seed: int) -> None:
    World(seed).run(steps=200)


def test_the_worlds_are_hostile_enough() -> None:
    """Evictions, preemptions, duplicates and chunks do happen, or the comparison would prove nothing."""
    preempted = evicted = doubled = 0
    for seed in range(12):
        world = World(seed)
        world.run(steps=120)
        preempted += world.preempted
        evicted += world.evicted
        doubled += sum(1 for n in world.told.values() if n > 1)
    assert preempted > 20
    assert evicted > 500
    assert doubled > 0
