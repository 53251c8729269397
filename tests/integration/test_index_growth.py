"""Nothing grows: many blocks through short-lived pods, many pods that come and go."""

import asyncio
import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from indexer.app import Indexer
from indexer.plan import Ledger
from indexer.source import SourceSpec
from indexer.wire import Batch, Removed, Stored
from router.core.hashing import pack_tokens
from router.core.types import WorkerAddress, WorkerId
from router.index.memory import MemoryIndex
from router.index.redis import RedisIndexWriter
from router.ops import Metrics
from tests.fakes.publisher import Publisher
from tests.fakes.redis_servers import running
from tests.integration.test_zmq_events import QUICK, batch, keys_of, until


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def churn(blocks: int, capacity: int, rng: Random) -> Iterator[Batch]:
    """A full cache: every batch stores 64 unseen blocks and removes as many."""
    held: list[int] = []
    tokens = pack_tokens(range(64))
    for _ in range(blocks // 64):
        names = tuple(rng.getrandbits(64) | 1 for _ in range(64))
        gone, held = held[: max(len(held) + 64 - capacity, 0)], held[max(len(held) + 64 - capacity, 0) :]
        held += names
        parent = None
        events: list[Any] = [Removed(tuple(gone))] if gone else []
        events.append(Stored(names, parent, pack_tokens([rng.getrandbits(31)]) + tokens[4:], 1))
        yield Batch(0.0, tuple(events))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_ten_million_blocks_through_twenty_short_lived_pods(kind: str, tmp_path: Path) -> None:
    with running("redis", tmp_path) if kind == "redis" else contextlib.nullcontext() as server:
        store: Any = RedisIndexWriter(server.url, seed="s", cool_s=0.0, deadline_s=30.0) if server else MemoryIndex()
        sizes: list[tuple[int, int]] = []
        for pod in range(20):
            await one_short_life(store, pod)
            gc.collect()
            used = server.command("INFO", "memory")["used_memory"] if server else 0  # type: ignore[index]
            sizes.append((resident_bytes(), int(used)))
        await store.close()
    rss, redis = [s[0] for s in sizes], [s[1] for s in sizes]
    print(
        f"\n{kind}: RSS after pods 5, 10, 20: {rss[4] >> 20}, {rss[9] >> 20}, {rss[-1] >> 20} MiB; Redis {redis[-1]} B"
    )
    assert max(rss[10:]) < 1.15 * max(rss[:5])
    assert max(redis[10:]) <= 1.15 * max(redis[:5])


async def one_short_life(store: Any, pod: int) -> None:
    """500,000 blocks in 20,000 places, then gone and swept."""
    worker = WorkerId(WorkerAddress(f"http://pod-{pod}"), "life")
    await store.register(worker)
    book = Ledger(seed="s", model="m")
    pending: list[Any] = []
    for seq, told in enumerate(churn(500_000, 20_000, Random(pod))):
        ops = book.receive(seq, told)
        assert isinstance(ops, list)
        pending += ops
        if seq % 64 == 63:
            await store.apply(worker, pending)
            pending = []
    assert book.claimed["gpu"] >= 19_000
    assert book.bytes_used / book.claimed["gpu"] <= 120
    await store.drop(worker.address)
    while await store.maintain():
        pass


async def come_and_go(cycles: int) -> None:
    """One publisher, whose pod is added and removed again and again."""
    metrics, index = Metrics(), MemoryIndex()
    indexer = Indexer(index, seed="s", metrics=metrics, times=QUICK)
    await indexer.start()
    counts: list[tuple[int, int, int]] = []
    try:
        with contextlib.closing(Publisher()) as publisher:
            publisher.publish(batch(1, 0))
            for cycle in range(cycles):
                address = WorkerAddress(f"http://pod-{cycle}")
                indexer.set_pods([SourceSpec(address, "m", publisher.events, publisher.replay)])
                if cycle % 4 == 0:
                    await until(lambda a=address: a in index.holders_now(keys_of(1, 1)))  # type: ignore[misc]
                    gc.collect()
                    counts.append((descriptors(), len(asyncio.all_tasks()), resident_bytes()))
                elif cycle % 3 == 0:
                    await asyncio.sleep(0.002)  # removed while it connects
            indexer.set_pods([])
            await until(lambda: not indexer._ending and not indexer._drops)
            await until(lambda: index.status()["retired_slots"] == 0)
            assert index.status()["blocks"]["gpu"] == index.status()["live_slots"] == 0
    finally:
        await indexer.close()
    early, late = counts[1 : len(counts) // 3], counts[-len(counts) // 3 :]
    for what, slack in ((0, 20), (1, 10), (2, 30 << 20)):
        assert max(c[what] for c in late) <= max(c[what] for c in early) + slack, counts


async def test_pods_that_come_and_go_leave_nothing() -> None:
    await come_and_go(100)


@pytest.mark.slow
async def test_a_thousand_pods_that_come_and_go_leave_nothing() -> None:
    await come_and_go(1000)
