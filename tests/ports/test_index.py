"""One suite over every store of the index port: memory, Redis 7 and Valkey."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from router.core.types import TIERS, Add, BlockKey, Clear, IndexOp, Remove, Tier, WorkerAddress, WorkerId
from router.index.memory import MemoryIndex
from router.index.port import Held, IndexReader, IndexWriter, SlotLost
from router.index.redis import RedisIndexReader, RedisIndexWriter
from router.ops import Metrics
from tests.fakes.redis_servers import Server, running

A, B, C = (WorkerId(WorkerAddress(f"http://{n}:8000"), f"life-{n}") for n in "abc")


@pytest.fixture(scope="module", params=["memory", "redis", "valkey"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server | None]:
    if request.param == "memory":
        yield None
        return
    folder: Path = tmp_path_factory.mktemp(request.param)
    with running(request.param, folder) as running_server:
        yield running_server


class Store:
    """A reader and a writer of one index. Lookups of the reader see every write that ended before."""

    def __init__(self, reader: IndexReader, writer: IndexWriter) -> None:
        self.reader, self.writer = reader, writer

    async def gpu(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        return {a.pod[7]: h.gpu for a, h in (await self.reader.holders(keys)).items() if h.gpu}

    async def sweep(self) -> None:
        for _ in range(20_000):
            if not await self.writer.maintain():
                return
        raise AssertionError("the sweep never ended")


@pytest.fixture
async def store(server: Server | None) -> AsyncIterator[Store]:
    if server is None:
        memory = MemoryIndex()
        yield Store(memory, memory)
        return
    server.command("FLUSHALL")
    writer = RedisIndexWriter(server.url, seed="s", deadline_s=20.0, cool_s=0.0)
    reader = RedisIndexReader(server.url, seed="s", deadline_s=20.0, near_cache_s=0, metrics=Metrics())
    await reader.start()
    yield Store(reader, writer)
    await reader.close()
    await writer.close()


def chain(n: int, tag: int = 0) -> list[BlockKey]:
    rng = Random(f"{tag}")
    return [BlockKey(rng.randbytes(8)) for _ in range(n)]


async def test_nobody_is_registered(store: Store) -> None:
    assert await store.reader.holders(chain(3)) == {}
    assert await store.reader.holders([]) == {}


async def test_depth_ends_at_the_first_gap_of_each_worker(store: Store) -> None:
    keys = chain(300)
    for worker in (A, B, C):
        await store.writer.register(worker)
    await store.writer.apply(A, [Add(tuple(keys))])
    await store.writer.apply(B, [Add(tuple(keys[:200])), Add(tuple(keys[201:]))])
    await store.writer.apply(C, [Add(tuple(keys[1:]))])
    assert await store.gpu(keys) == {"a": 300, "b": 200}
    assert await store.gpu(keys[:150]) == {"a": 150, "b": 150}
    assert await store.gpu(keys[1:]) == {"a": 299, "b": 199, "c": 299}


async def test_operations_apply_in_order_and_twice_is_once(store: Store) -> None:
    keys = tuple(chain(4))
    await store.writer.register(A)
    ops: list[IndexOp] = [Add(keys), Remove(keys[2:]), Add(keys[3:]), Remove((BlockKey(b"unknown!"),))]
    for _ in range(2):
        await store.writer.apply(A, ops)
        assert await store.gpu(keys) == {"a": 2}
    await store.writer.apply(A, [Add(keys[2:3])])
    assert await store.gpu(keys) == {"a": 4}


async def test_one_workers_removal_leaves_the_others(store: Store) -> None:
    keys = tuple(chain(5))
    for worker in (A, B):
        await store.writer.register(worker)
        await store.writer.apply(worker, [Add(keys)])
    await store.writer.apply(A, [Remove(keys)])
    assert await store.gpu(keys) == {"b": 5}
    await store.writer.drop(A.address)
    assert await store.gpu(keys) == {"b": 5}


async def test_a_new_life_begins_empty_and_the_old_one_can_write_nothing(store: Store) -> None:
    keys = tuple(chain(5))
    await store.writer.register(A)
    await store.writer.apply(A, [Add(keys)])
    again = WorkerId(A.address, "second life")
    await store.writer.register(again)
    assert await store.gpu(keys) == {}
    with pytest.raises(SlotLost, match="unregistered"):
        await store.writer.apply(A, [Add(keys)])
    assert await store.gpu(keys) == {}
    await store.writer.apply(again, [Add(keys[:2])])
    assert await store.gpu(keys) == {"a": 2}


async def test_clear_voids_what_came_before_it(store: Store) -> None:
    keys = tuple(chain(5))
    await store.writer.register(A)
    await store.writer.apply(A, [Add(keys)])
    await store.writer.apply(A, [Add(keys), Clear(), Add(keys[:1])])
    assert await store.gpu(keys) == {"a": 1}


async def test_a_dropped_worker_is_gone_at_once_and_unknown_afterwards(store: Store) -> None:
    keys = tuple(chain(5))
    await store.writer.register(A)
    await store.writer.apply(A, [Add(keys)])
    await store.writer.learnt(A, 16)
    await store.writer.drop(A.address)
    await store.writer.drop(A.address)
    assert await store.gpu(keys) == {}
    if isinstance(store.reader, MemoryIndex):
        assert A.address not in block_sizes(store)
    with pytest.raises(SlotLost):
        await store.writer.apply(A, [Add(keys)])


async def test_a_slot_is_given_again_only_when_its_bits_are_swept(store: Store) -> None:
    keys = tuple(chain(700))
    await store.writer.register(A)
    await store.writer.apply(A, [Add(keys)])
    for life in range(5):
        await store.writer.register(WorkerId(A.address, f"life {life}"))
        assert await store.gpu(keys) == {}, f"life {life} has a slot with old bits"
    await store.writer.register(B)
    await store.writer.apply(B, [Add(keys[:10])])
    await store.sweep()
    for life in range(8):
        await store.writer.register(WorkerId(A.address, f"later life {life}"))
        assert await store.gpu(keys) == {"b": 10}
        await store.sweep()


async def test_sweeping_leaves_nothing_behind(store: Store, server: Server | None) -> None:
    keys = tuple(chain(1000))
    for worker in (A, B):
        await store.writer.register(worker)
        await store.writer.apply(worker, [Add(keys), Add(keys[:10], "cpu")])
    await store.writer.drop(A.address)
    await store.sweep()
    assert await store.gpu(keys) == {"b": 1000}
    await store.writer.drop(B.address)
    await store.sweep()
    if server is None:
        assert isinstance(store.reader, MemoryIndex)
        assert store.reader.status()["blocks"] == {"gpu": 0, "cpu": 0}
    else:
        names = server.command("KEYS", "*")
        assert isinstance(names, list)
        assert all(name.startswith(b"warmroute:") for name in names), len(names)


async def test_tiers_lie_over_each_other(store: Store) -> None:
    keys = tuple(chain(10))
    for worker in (A, B):
        await store.writer.register(worker)
    await store.writer.apply(A, [Add(keys[:4]), Add(keys[4:6], "cpu"), Add(keys[6:7], "storage"), Add(keys[7:])])
    await store.writer.apply(B, [Add(keys[:8], "cpu"), Add(keys[:2])])
    expected = {A.address: Held(4, 6, 10), B.address: Held(2, 8, 8)}
    assert await store.reader.holders(keys) == expected
    await store.writer.apply(A, [Remove(keys[4:5], "cpu"), Remove(keys[:1], "cpu")])
    assert await store.reader.holders(keys) == {**expected, A.address: Held(4, 4, 4)}


async def test_the_block_size_reaches_the_reader(store: Store) -> None:
    await store.writer.register(A)
    await store.writer.learnt(A, 16)
    await store.writer.learnt(A, 64)
    await store.reader.holders(chain(1))  # a lookup notices a changed registry
    assert block_sizes(store) == {A.address: 64}


async def test_removals_and_new_lives_are_told_to_listeners(store: Store, until: Callable[..., Any]) -> None:
    keys = tuple(chain(6))
    heard: list[tuple[WorkerAddress, object]] = []

    class Listener:
        def removed(self, address: WorkerAddress, keys: Sequence[BlockKey]) -> None:
            heard.append((address, tuple(keys)))

        def cleared(self, address: WorkerAddress) -> None:
            heard.append((address, "cleared"))

    await store.writer.register(A)
    await store.writer.apply(A, [Add(keys)])
    await store.reader.holders(keys)
    store.reader.listen(Listener())  # type: ignore[attr-defined]
    if not isinstance(store.reader, MemoryIndex):
        await until(lambda: store.reader.status()["feed_connected"])  # type: ignore[attr-defined]
    heard.clear()
    await store.writer.apply(A, [Remove(keys[4:])])
    await until(lambda: heard == [(A.address, keys[4:])])
    await store.writer.apply(A, [Clear()])
    await store.reader.holders(keys)
    await until(lambda: heard[1:] == [(A.address, "cleared")])


async def test_random_operations_agree_with_a_set_per_worker(store: Store) -> None:
    """The oracle is a set of keys per worker and tier, and a loop that counts."""
    rng = Random(7)
    keys = chain(40)
    lives = dict.fromkeys((A.address, B.address, C.address), 0)
    truth: dict[tuple[WorkerAddress, Tier], set[BlockKey]] = {}
    workers: dict[WorkerAddress, WorkerId] = {}
    for step in range(250):
        address = rng.choice(list(lives))
        if address not in workers or rng.random() < 0.05:
            lives[address] += 1
            workers[address] = WorkerId(address, f"life {lives[address]}")
            await store.writer.register(workers[address])
            truth.update({(address, t): set() for t in TIERS})
        elif rng.random() < 0.05:
            del workers[address]
            await store.writer.drop(address)
            truth.update({(address, t): set() for t in TIERS})
        else:
            tier = rng.choice(["gpu", "gpu", "gpu", "cpu", "storage"])
            start = rng.randrange(40)
            some = tuple(keys[start : start + rng.randrange(1, 30)])
            add = rng.random() < 0.7
            await store.writer.apply(workers[address], [Add(some, tier) if add else Remove(some, tier)])
            held = truth[address, tier]
            truth[address, tier] = held | set(some) if add else held - set(some)
        if step % 10 == 0:
            await store.writer.maintain()
        assert dict(await store.reader.holders(keys)) == counted(truth, lives, keys), f"step {step}"


def counted(
    truth: dict[tuple[WorkerAddress, Tier], set[BlockKey]], addresses: dict[WorkerAddress, int], keys: list[BlockKey]
) -> dict[WorkerAddress, Held]:
    out = {}
    for address in addresses:
        depths = []
        union: set[BlockKey] = set()
        for tier in TIERS:
            union = union | truth.get((address, tier), set())
            depths.append(next((i for i, k in enumerate(keys) if k not in union), len(keys)))
        if depths[-1]:
            out[address] = Held(*depths)
    return out


def block_sizes(store: Store) -> Any:
    return store.reader.block_sizes()  # type: ignore[attr-defined]
