"""A worker's events over real ZMQ sockets: start, gap, replay in both layouts, restart, ranks, floods, silence."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from indexer.app import Indexer
from indexer.consumer import Limits
from indexer.plan import Ledger
from indexer.source import Inbox, Live, SourceSpec, SourceTimes, rank_specs
from indexer.wire import decode
from router.core.hashing import chain_keys, pack_tokens, root_key
from router.core.types import BlockKey, WorkerAddress
from router.index.memory import MemoryIndex
from router.ops import Metrics
from tests.fakes.publisher import Publisher
from tests.fakes.recorded import frames

POD = WorkerAddress("http://pod:8000")
LIMITS = Limits()
QUICK = SourceTimes(connect_s=5.0, backoff_first_s=0.02, backoff_max_s=0.2, replay_silence_s=5.0)


async def until(condition: Callable[[], object], what: str = "", within_s: float = 40.0) -> None:
    ends = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends, f"never: {what}"
        await asyncio.sleep(0.01)


class Scribe:
    """An Indexer over a MemoryIndex."""

    def __init__(self, times: SourceTimes = QUICK, limits: Limits = LIMITS) -> None:
        self.index, self.metrics = MemoryIndex(), Metrics()
        self.indexer = Indexer(self.index, seed="s", metrics=self.metrics, times=times, limits=limits)

    def state(self, address: WorkerAddress = POD) -> dict[str, Any]:
        return self.indexer.status()[str(address)]

    async def reached(self, seq: int, address: WorkerAddress = POD) -> None:
        """The batch `seq` is learnt and in the index."""
        await until(
            lambda: (
                (s := self.state(address))["last_seq"] == seq
                and not s["unwritten_blocks"]
                and not s["store_behind"]
                and s["connected"]
            ),
            f"{address} at {seq}: {self.state(address)}",
        )

    def depth(self, keys: list[BlockKey], address: WorkerAddress = POD) -> int:
        held = self.index.holders_now(keys).get(address)
        return held.gpu if held else 0

    def count(self, what: str) -> float:
        return self.metrics.value("warmroute_kv_events_total", what=what)


@pytest.fixture
async def scribe() -> AsyncIterator[Scribe]:
    it = Scribe()
    await it.indexer.start()
    yield it
    await it.indexer.close()


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with contextlib.closing(Publisher()) as it:
        yield it


def spec(publisher: Publisher, address: WorkerAddress = POD) -> SourceSpec:
    return SourceSpec(address, "m", publisher.events, publisher.replay)


SIZE = 4


def keys_of(chat: int, blocks: int) -> list[BlockKey]:
    tokens = [chat * 1000 + i for i in range(blocks * SIZE)]
    return chain_keys(root_key(seed="s", model="m"), pack_tokens(tokens), SIZE)


def batch(chat: int, block: int, *, removed: bool = False) -> bytes:
    """Block `block` of a chat of its own is stored (or removed)."""
    name = chat * 1000 + block
    event: dict[str, Any] = {"type": "BlockRemoved" if removed else "BlockStored", "block_hashes": [name + 1]}
    if not removed:
        start = chat * 1000 + block * SIZE
        event |= {
            "parent_block_hash": name if block else None,
            "token_ids": list(range(start, start + SIZE)),
            "block_size": SIZE,
        }
    return msgspec.msgpack.encode([0.0, [event], 0])


@pytest.mark.parametrize("layout", ["old", "new"])
async def test_late_start_gap_and_replay_end_where_the_whole_stream_ends(
    scribe: Scribe, layout: Literal["old", "new"]
) -> None:
    told = [payload for _, payload in frames("default")]
    whole = Ledger(seed="s", model="m")
    for seq, payload in enumerate(told):
        whole.receive(seq, decode(payload))
    expected = set(whole.claims("gpu"))
    with contextlib.closing(Publisher(layout=layout)) as publisher:
        for payload in told[:20]:
            publisher.publish(payload)
        scribe.indexer.set_pods([spec(publisher)])
        await scribe.reached(19)
        for payload in told[20:30]:
            publisher.publish(payload)
        await scribe.reached(29)
        publisher.publish(told[30], lose=True)
        for payload in told[31:]:
            publisher.publish(payload)
        await scribe.reached(len(told) - 1)
        state = scribe.state()
        assert (state["gaps"], state["replays"], state["forgets"], state["history_whole"]) == (1, 2, 0, True)
        assert {k for k in expected if scribe.depth([k])} == expected
        assert state["blocks"]["gpu"] == len(expected)
        assert [r[0] for r in publisher.requests] == [b"", b""]
        assert [int.from_bytes(r[1], "big") for r in publisher.requests] == [0, 29]
        assert scribe.index.block_sizes() == {POD: 32}
        before = state["replays"]
        publisher.publish(told[0])
        await scribe.reached(len(told))
        assert scribe.state()["replays"] == before  # no second recovery without a new gap


async def test_what_lies_at_the_socket_is_found_by_whatever_the_loop_does_next(
    scribe: Scribe, publisher: Publisher
) -> None:
    """A router that was busy reads events and a request in one go: the request's lookup must see the events."""
    publisher.publish(batch(1, 0))
    scribe.indexer.set_pods([spec(publisher)])
    await scribe.reached(0)
    for block in (1, 2):
        publisher.publish(batch(1, block))
    time.sleep(0.5)  # the loop stands still; libzmq's own thread does not
    await asyncio.sleep(0)  # the loop looks at its sockets
    await asyncio.sleep(0)  # and calls whoever waits for them
    assert scribe.depth(keys_of(1, 3)) == 3


async def test_a_replay_that_begins_too_late_drops_what_is_uncertain(scribe: Scribe) -> None:
    with contextlib.closing(Publisher(buffer_batches=3)) as publisher:
        scribe.indexer.set_pods([spec(publisher)])
        await until(lambda: scribe.state()["last_replay"])
        publisher.publish(batch(1, 0))
        publisher.publish(batch(1, 1))
        await scribe.reached(1)
        assert scribe.depth(keys_of(1, 2)) == 2
        for chat in (2, 3, 4):
            publisher.publish(batch(chat, 0), lose=True)
        publisher.publish(batch(5, 0))  # seq 5; the buffer holds 3, 4, 5
        await scribe.reached(5)
        assert scribe.depth(keys_of(1, 2)) == 0
        assert [scribe.depth(keys_of(chat, 1)) for chat in (2, 3, 4, 5)] == [0, 1, 1, 1]
        assert scribe.state()["forgets"] == 1


async def test_events_of_before_the_subscription_come_by_replay(scribe: Scribe, publisher: Publisher) -> None:
    for block in range(50):
        publisher.publish(batch(1, block))
    scribe.indexer.set_pods([spec(publisher)])
    await scribe.reached(49)
    assert scribe.depth(keys_of(1, 50)) == 50


class Killable:
    """A publisher in a process of its own."""

    def __init__(self, events: str = "tcp://127.0.0.1:*", replay: str = "tcp://127.0.0.1:*") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.publisher", events, replay],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self.events, self.replay = self._line().split()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def publish(self, payload: bytes) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(payload.hex() + "\n")
        self._process.stdin.flush()
        return int(self._line())

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


async def test_killed_and_started_again_at_the_same_address(scribe: Scribe) -> None:
    """The new process passes the old one's number before we look: only the replayed content tells them apart."""
    first = Killable()
    try:
        scribe.indexer.set_pods([SourceSpec(POD, "m", first.events, first.replay)])
        await until(lambda: scribe.state()["last_replay"])
        for block in range(5):
            first.publish(batch(1, block))
        await scribe.reached(4)
        assert scribe.depth(keys_of(1, 5)) == 5
    finally:
        first.kill()
    second = Killable(first.events, first.replay)
    try:
        for block in range(9):
            second.publish(batch(2, block))
        await until(lambda: scribe.state()["last_seq"] == 8)
        await scribe.reached(8)
        assert scribe.depth(keys_of(1, 5)) == 0
        assert scribe.depth(keys_of(2, 9)) == 9
        assert scribe.state()["forgets"] >= 1
        second.publish(batch(2, 9))
        await scribe.reached(9)
        assert scribe.depth(keys_of(2, 10)) == 10
    finally:
        second.kill()


async def test_a_cut_connection_to_the_same_process_loses_nothing(scribe: Scribe, publisher: Publisher) -> None:
    scribe.indexer.set_pods([spec(publisher)])
    await until(lambda: scribe.state()["last_replay"])
    for block in range(3):
        publisher.publish(batch(1, block))
    await scribe.reached(2)
    replays = scribe.state()["replays"]
    scribe.indexer._consumers[POD].source.reconnect()
    await until(lambda: scribe.state()["replays"] > replays and scribe.state()["connected"])
    publisher.publish(batch(1, 3))
    await scribe.reached(3)
    assert scribe.depth(keys_of(1, 4)) == 4
    assert scribe.state()["forgets"] == 0


async def test_told_of_a_restart_it_forgets_at_once_and_learns_anew(scribe: Scribe, publisher: Publisher) -> None:
    scribe.indexer.set_pods([spec(publisher)])
    await until(lambda: scribe.state()["last_replay"])
    publisher.publish(batch(1, 0))
    await scribe.reached(0)
    scribe.indexer.restarted(POD.pod)
    assert scribe.state()["blocks"]["gpu"] == 0
    await scribe.reached(0)
    assert scribe.depth(keys_of(1, 1)) == 1  # the publisher is the same one: its replay tells it again


async def test_without_a_replay_endpoint_a_gap_and_a_reconnect_start_cold(scribe: Scribe) -> None:
    with contextlib.closing(Publisher(replay=None)) as publisher:
        scribe.indexer.set_pods([spec(publisher)])

        async def heard(chats: range) -> int:
            """The first of these chats that is heard: nothing else tells when the subscription has arrived."""
            for chat in chats:
                publisher.publish(batch(chat, 0))
                for _ in range(10):
                    if scribe.depth(keys_of(chat, 1)):
                        return chat
                    await asyncio.sleep(0.01)
            raise AssertionError("never heard")

        first = await heard(range(1, 300))
        publisher.publish(batch(900, 0), lose=True)
        publisher.publish(batch(901, 0))
        await until(lambda: scribe.depth(keys_of(901, 1)))
        assert [scribe.depth(keys_of(chat, 1)) for chat in (first, 900)] == [0, 0]
        replays = scribe.state()["replays"]
        scribe.indexer._consumers[POD].source.reconnect()
        await until(lambda: scribe.state()["replays"] > replays)
        await heard(range(300, 600))
        assert scribe.depth(keys_of(901, 1)) == 0


async def test_a_start_whose_replay_is_not_answered_tries_again(publisher: Publisher) -> None:
    scribe = Scribe(
        SourceTimes(backoff_first_s=0.02, replay_silence_s=0.2), Limits(short_retry_s=0.2, replay_pause_s=0.01)
    )
    await scribe.indexer.start()
    try:
        publisher.answering = False
        for block in range(4):
            publisher.publish(batch(1, block))
        scribe.indexer.set_pods([spec(publisher)])
        await until(lambda: scribe.state()["replays"] >= 1 and scribe.state()["last_replay"])
        publisher.publish(batch(1, 4))
        await until(lambda: scribe.state()["last_seq"] == 4)
        assert scribe.depth(keys_of(1, 5)) == 0
        publisher.answering = True
        await until(lambda: scribe.depth(keys_of(1, 5)) == 5)
        assert scribe.state()["history_whole"]
    finally:
        await scribe.indexer.close()


async def test_garbage_and_future_events_do_not_stop_it(scribe: Scribe, publisher: Publisher) -> None:
    scribe.indexer.set_pods([spec(publisher)])
    await until(lambda: scribe.state()["last_replay"])
    publisher.publish(batch(1, 0))
    await scribe.reached(0)
    publisher.publish(b"\xc1 not msgpack")
    await scribe.reached(1)
    assert scribe.state()["undecodable"] == 1
    assert scribe.depth(keys_of(1, 1)) == 0  # what the lost batch said is unknown
    publisher.publish(msgspec.msgpack.encode([0.0, [{"type": "Later"}], 0, "more"]))
    publisher.publish(batch(2, 0))
    publisher.send_raw(2**63, b"")
    await until(lambda: scribe.depth(keys_of(2, 1)) == 1 or scribe.state()["last_seq"] > 3)
    publisher.publish(batch(3, 0))
    await until(lambda: scribe.depth(keys_of(3, 1)) == 1)


async def test_ranks_are_workers_of_their_own(scribe: Scribe) -> None:
    for _ in range(20):
        base = Publisher()
        port = int(base.events.rpartition(":")[2])
        replay = int(base.replay.rpartition(":")[2]) if base.replay else 0
        try:
            other = Publisher(f"tcp://127.0.0.1:{port + 1}", f"tcp://127.0.0.1:{replay + 1}")
        except Exception:  # the next port is taken: another pair
            base.close()
            continue
        break
    with contextlib.closing(base), contextlib.closing(other):
        scribe.indexer.set_pods(rank_specs(POD.pod, "m", base.events, base.replay, ranks=2))
        await until(lambda: all(s["last_replay"] for s in scribe.indexer.status().values()))
        base.publish(batch(1, 0))
        other.publish(batch(2, 0))
        first, second = WorkerAddress(POD.pod, 0), WorkerAddress(POD.pod, 1)
        await scribe.reached(0, first)
        await scribe.reached(0, second)
        assert set(scribe.index.holders_now(keys_of(1, 1))) == {first}
        assert set(scribe.index.holders_now(keys_of(2, 1))) == {second}


async def test_a_removed_pod_leaves_nothing_even_with_events_queued(scribe: Scribe, publisher: Publisher) -> None:
    with contextlib.closing(Publisher()) as other:
        gone, stays = WorkerAddress("http://gone"), WorkerAddress("http://stays")
        specs = [spec(publisher, gone), spec(other, stays)]
        scribe.indexer.set_pods(specs)
        await until(lambda: all(s["last_replay"] for s in scribe.indexer.status().values()))
        for chat in range(1000):
            publisher.publish(batch(chat, 0))
        other.publish(batch(1, 0))
        await scribe.reached(0, stays)
        connections = scribe.state(stays)["connections"]
        scribe.indexer.set_pods(specs[1:])
        assert str(gone) not in scribe.indexer.status()
        await until(lambda: gone not in scribe.index.holders_now(keys_of(1, 1)))
        for _ in range(20):
            await asyncio.sleep(0)
            assert all(gone not in scribe.index.holders_now(keys_of(chat, 1)) for chat in range(0, 1000, 50))
        assert set(scribe.index.holders_now(keys_of(1, 1))) == {stays}
        assert scribe.state(stays)["connections"] == connections  # the others are not touched
        await until(lambda: scribe.index.status()["retired_slots"] == 0)
        assert scribe.index.status()["blocks"]["gpu"] == 1


async def test_an_unchanged_list_changes_nothing(scribe: Scribe, publisher: Publisher) -> None:
    scribe.indexer.set_pods([spec(publisher)])
    await until(lambda: scribe.state()["last_replay"])
    publisher.publish(batch(1, 0))
    await scribe.reached(0)
    before = scribe.state()
    for _ in range(3):
        scribe.indexer.set_pods([spec(publisher)])
    after = scribe.state()
    assert (after["connections"], after["replays"]) == (before["connections"], before["replays"])
    assert scribe.depth(keys_of(1, 1)) == 1


async def test_a_flood_ends_in_the_right_state(scribe: Scribe, publisher: Publisher) -> None:
    scribe.indexer.set_pods([spec(publisher)])
    await until(lambda: scribe.state()["last_replay"])
    held: Counter[int] = Counter()
    for n in range(5000):
        chat = n * 7919 % 500
        removing = held[chat] > 0
        publisher.publish(batch(chat, 0, removed=removing))
        held[chat] += -1 if removing else 1
    await scribe.reached(4999)
    assert {c for c in range(500) if scribe.depth(keys_of(c, 1))} == {c for c, n in held.items() if n}
    assert scribe.state()["forgets"] == 0


async def test_a_closed_port_is_told_with_the_likely_cause() -> None:
    now_s = [0.0]
    metrics = Metrics()
    indexer = Indexer(MemoryIndex(), seed="s", metrics=metrics, clock=lambda: now_s[0], times=QUICK)
    await indexer.start()
    try:
        with contextlib.closing(Publisher()) as publisher:
            events = publisher.events
        indexer.set_pods([SourceSpec(POD, "m", events, None)])
        await until(lambda: indexer.status()[str(POD)]["last_error"])
        assert indexer.status()[str(POD)]["problem"] is None
        now_s[0] = 31.0
        assert "tcp://*:PORT" in indexer.status()[str(POD)]["problem"]
        await until(lambda: metrics.value("warmroute_kv_sources", state="silent") == 1)
    finally:
        await indexer.close()


async def test_silence_is_told_of_a_pod_that_had_something_to_tell_and_of_a_feed_that_is_lost() -> None:
    now_s, doing = [0.0], ["idle"]
    metrics = Metrics()
    indexer = Indexer(MemoryIndex(), seed="s", metrics=metrics, clock=lambda: now_s[0], times=QUICK)
    indexer.activity = lambda _: doing[0]  # type: ignore[assignment,return-value]
    await indexer.start()

    def problem() -> str | None:
        return indexer.status()[str(POD)]["problem"]

    async def observed(at_s: float, silent: int) -> None:
        now_s[0] = at_s
        await until(lambda: metrics.value("warmroute_kv_sources", state="silent") == silent)

    try:
        with contextlib.closing(Publisher()) as publisher:
            indexer.set_pods([SourceSpec(POD, "m", publisher.events, None)])
            await until(lambda: indexer.status()[str(POD)]["connected"])
            await observed(40.0, silent=0)
            assert problem() is None, "no request came: nothing to tell"
            doing[0] = "busy"
            await observed(42.0, silent=1)
            assert "no KV event came" in problem()
            await until(lambda: publisher.publish(batch(1, 0)) or indexer.status()[str(POD)]["event_age_s"] is not None)
            await observed(44.0, silent=0)
        await until(lambda: not indexer.status()[str(POD)]["connected"])
        assert problem() is None, "a moment ago it was there"
        await observed(80.0, silent=1)
        assert "was lost" in problem()
        doing[0] = "away"
        await observed(82.0, silent=0)
        assert problem() is None, "it takes no requests: another alert's"
    finally:
        await indexer.close()


# -- the queue ----------------------------------------------------------------------------------------------------


async def test_a_full_queue_drops_and_marks_the_hole_once() -> None:
    inbox = Inbox(max_messages=3)
    for seq in range(6):
        inbox.put(Live(1, seq, b"x"))
    got = [await inbox.get() for _ in range(len(inbox))]
    assert [getattr(item, "seq", "dropped") for item in got] == [0, 1, 2, "dropped"]
    assert inbox.dropped_messages == 3


async def test_the_queue_is_bounded_in_bytes_too() -> None:
    inbox = Inbox(max_bytes=100)
    for seq in range(4):
        inbox.put(Live(1, seq, bytes(40)))
    assert inbox.dropped_messages == 2
    await inbox.get()
    inbox.put(Live(1, 9, bytes(40)))
    assert inbox.dropped_messages == 2
