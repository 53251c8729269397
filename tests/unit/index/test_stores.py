"""Breaker, near cache, registry and the memory store's housekeeping, without any server."""

import asyncio
from random import Random

from router.core.types import Add, BlockKey, WorkerAddress, WorkerId
from router.index.breaker import FAILURES, OPEN_FIRST_S, Breaker
from router.index.lua import block_prefixes, fingerprint
from router.index.memory import MemoryIndex
from router.index.near import NearCache
from router.index.registry import EMPTY, UNATTENDED_AFTER_S, Attendance, address_of, parse_registry


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def chain(n: int) -> list[BlockKey]:
    rng = Random(n)
    return [BlockKey(rng.randbytes(8)) for _ in range(n)]


# -- breaker ------------------------------------------------------------------------------------------------------


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(Clock())
    for _ in range(FAILURES - 1):
        breaker.failed()
    breaker.succeeded()
    for _ in range(FAILURES - 1):
        breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows()


def test_calls_that_waited_at_the_same_time_are_one_failure() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(FAILURES):
        began_s = clock.now_s
        assert breaker.allows()
        clock.now_s += 0.02
        for _ in range(100):
            breaker.failed(began_s=began_s)
    assert not breaker.allows()


def test_only_a_probe_after_a_rest_closes_it() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(FAILURES):
        breaker.failed()
    breaker.succeeded()
    breaker.probed()
    assert breaker.state == "open"
    clock.now_s += OPEN_FIRST_S
    breaker.failed()  # the probe was slow: rest longer
    clock.now_s += OPEN_FIRST_S
    breaker.probed()
    assert breaker.state == "open"
    clock.now_s += OPEN_FIRST_S
    breaker.probed()
    assert breaker.state == "closed"


# -- near cache ---------------------------------------------------------------------------------------------------


def near() -> tuple[NearCache, Clock]:
    clock = Clock()
    cache = NearCache(1.0, clock)
    cache.enable()
    return cache, clock


def test_what_was_seen_twice_is_kept_for_a_moment() -> None:
    cache, clock = near()
    keys = chain(5)
    cache.saw(keys, [3, 3, 3, 0, 3])
    assert cache.head("gpu", keys) == []
    cache.saw(keys[:2], [3, 1])
    assert cache.head("gpu", keys) == [3, 1]
    assert cache.head("cpu", keys) == []
    assert cache.head("gpu", keys[1:]) == [1]
    clock.now_s += 0.6
    assert cache.head("gpu", keys) == [3, 1]
    clock.now_s += 0.6
    assert cache.head("gpu", keys) == []


def test_removed_blocks_leave_it_and_without_a_feed_nothing_is_kept() -> None:
    cache, _ = near()
    keys = chain(5)
    for _ in range(2):
        cache.saw(keys, [1] * 5)
    cache.forget([keys[2]])
    assert cache.head("gpu", keys) == [1, 1]
    cache.disable()
    cache.saw(keys, [1] * 5)
    assert (len(cache), cache.head("gpu", keys)) == (0, [])


def test_it_is_bounded() -> None:
    cache, _ = near()
    for n in range(1, 400):
        keys = chain(1000 + n)
        cache.saw(keys, [1] * len(keys))
        cache.saw(keys, [1] * len(keys))
    assert len(cache) <= 2 * 100_000 + 2000


# -- names and registry -------------------------------------------------------------------------------------------


def test_two_installations_and_two_epochs_never_share_a_name() -> None:
    names = {p for seed in ("a", "b") for e in ("1", "2") for p in block_prefixes(fingerprint(seed), e).values()}
    assert len(names) == 12
    assert {len(n) for n in names} == {4}
    assert "a-very-secret-seed" not in fingerprint("a-very-secret-seed")


def test_a_registry_reads_back() -> None:
    flat = [
        b"epoch", b"e", b"n", b"7", b"s:3", b"http://a:1#2", b"a:http://a:1#2", b"3|life", b"b:http://a:1#2", b"64",
        b"r:1", b"w|5", b"tiers", b"gpu,storage",
    ]  # fmt: skip
    registry = parse_registry(flat)
    a = WorkerAddress("http://a:1", 2)
    assert (registry.version, registry.names, registry.live_mask) == (b"e:7", {3: a}, 8)
    assert (registry.lives, registry.sizes, registry.retired_slots) == ({a: "3|life"}, {a: 64}, 1)
    assert registry.tiers == ("gpu", "storage")
    assert address_of(str(a)) == a
    assert parse_registry([]) is EMPTY


# -- memory -------------------------------------------------------------------------------------------------------


def test_a_worker_whose_lease_is_not_renewed_is_unattended_after_a_while() -> None:
    attendance = Attendance()

    def seen(now_s: float, *leases: str) -> int:
        fields = [b"epoch", b"e"]
        for n, lease in enumerate(leases):
            fields += [f"a:http://{n}#0".encode(), b"0|i", f"o:http://{n}#0".encode(), lease.encode()]
        return attendance.unattended(parse_registry(fields), now_s)

    assert [seen(t, "x|1", f"y|{t}") for t in (0.0, UNATTENDED_AFTER_S - 0.1, UNATTENDED_AFTER_S)] == [0, 0, 1]
    assert seen(UNATTENDED_AFTER_S + 1, "x|2", "y|99") == 0  # somebody is back
    assert seen(1e6) == 0  # all are gone
    assert seen(1e6 + 1, "x|2") == 0  # and one is new


def test_a_worker_that_no_indexer_ever_registered_is_unattended_too() -> None:
    attendance, nobody = Attendance(), parse_registry([])
    worker = WorkerAddress("http://a")
    times = (0.0, UNATTENDED_AFTER_S - 0.1, UNATTENDED_AFTER_S)
    assert [attendance.unattended(nobody, t, [worker]) for t in times] == [0, 0, 1]
    assert attendance.unattended(nobody, 1e6) == 0  # it does not serve any more


def test_a_thousand_pods_come_and_go_and_nothing_grows() -> None:
    async def run() -> None:
        index = MemoryIndex()
        keys = tuple(chain(50))
        for n in range(1000):
            worker = WorkerId(WorkerAddress(f"http://{n}"), "life")
            await index.register(worker)
            await index.apply(worker, [Add(keys)])
            await index.learnt(worker, 16)
            await index.drop(worker.address)
            if n % 3 == 0:
                while await index.maintain():
                    pass
        while await index.maintain():
            pass
        assert index.status() == {"store": "memory", "blocks": {"gpu": 0}, "live_slots": 0, "retired_slots": 0}
        last = WorkerId(WorkerAddress("http://last"), "life")
        await index.register(last)
        await index.apply(last, [Add(keys)])
        assert index._slots[last.address] == 0  # slots are used again
        assert not index.block_sizes()

    asyncio.run(run())
