"""What this router routed lately: depth, ends, forgetting, bounds; and the estimate of a working set."""

from itertools import permutations
from random import Random

import pytest

from router.core.types import BlockKey, WorkerAddress
from router.index.local import LocalView, Note

A, B = WorkerAddress("http://a"), WorkerAddress("http://b")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def chain(n: int, tag: int = 0) -> list[BlockKey]:
    rng = Random(tag)
    return [BlockKey(rng.randbytes(8)) for _ in range(n)]


def test_depth_is_that_of_the_deepest_chain_noted_there() -> None:
    view = LocalView(ttl_s=10, clock=Clock())
    keys, other = chain(300), chain(300, 1)
    view.note(A, keys[:120])
    view.note(B, keys[:7])
    view.note(B, other)
    assert view.holders(keys) == {A: 120, B: 7}
    assert view.holders(other[:50]) == {B: 50}
    assert (view.depth(A, keys), view.depth(B, keys), view.depth(A, other)) == (120, 7, 0)
    assert view.holders([]) == {}
    assert view.holders(keys[1:]) == {A: 119, B: 6}


def test_an_entry_ends_and_the_last_word_counts() -> None:
    clock = Clock()
    view = LocalView(ttl_s=10, clock=clock)
    keys = chain(40)
    view.note(A, keys)
    clock.now_s += 9.9
    assert view.holders(keys) == {A: 40}
    view.note(A, keys[:20], ttl_s=100)
    clock.now_s += 0.2
    assert view.holders(keys) == {A: 20}
    view.note(A, keys[:20], ttl_s=1)
    clock.now_s += 1.0
    assert view.holders(keys) == {}


def test_a_removed_block_ends_the_match_before_it() -> None:
    view = LocalView(clock=Clock())
    keys = chain(64)
    view.note(A, keys)
    view.note(B, keys)
    view.removed(A, [keys[33], keys[50], BlockKey(b"unknown!")])
    assert view.holders(keys) == {A: 33, B: 64}
    view.forget(B)
    assert view.holders(keys) == {A: 33}
    view.cleared(A)
    assert view.holders(keys) == {}
    view.forget(B, keys)


@pytest.mark.parametrize("hole", [0, 1, 2, 3, 4, 7, 8, 9, 255, 256, 257, 299])
def test_any_hole_is_found_whatever_the_steps(hole: int) -> None:
    view = LocalView(clock=Clock())
    keys = chain(300)
    view.note(A, keys)
    view.forget(A, [keys[hole]])
    assert view.holders(keys) == ({A: hole} if hole else {})


def test_it_stays_within_its_bound_and_forgets_the_oldest_first() -> None:
    view = LocalView(ttl_s=1e9, max_blocks=20_000, clock=Clock())
    for tag in range(400):
        view.note(A if tag % 4 else B, chain(200, tag))
    assert view.blocks <= 20_000 + 8192 * 2  # pruned when a worker's table has doubled
    assert view.holders(chain(200, 399)) == {A: 200}
    assert view.holders(chain(200, 1)) == {}


def test_ended_entries_are_pruned() -> None:
    clock = Clock()
    view = LocalView(ttl_s=1, clock=clock)
    for tag in range(300):
        view.note(A, chain(200, tag))
        clock.now_s += 1
    assert view.blocks < 20_000


def burst(view: LocalView, clock: Clock, chains: list[list[BlockKey]]) -> list[Note]:
    notes = []
    for keys in chains:
        notes.append(view.note(A, keys, ttl_s=30))
        clock.now_s += 0.001
    return notes


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_burst_that_was_refused_whole_leaves_nothing_in_whatever_order(order: tuple[int, ...]) -> None:
    shared, clock = chain(40), Clock()
    for chains in ([shared] * 3, [shared + chain(5, tag) for tag in range(1, 4)], [shared[:30], shared, shared[:10]]):
        view = LocalView(clock=clock)
        notes = burst(view, clock, chains)
        for i in order:
            view.unsay(notes[i])
        assert view.blocks == 0


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_what_one_of_a_burst_computed_stays_when_the_others_are_refused(order: tuple[int, ...]) -> None:
    clock = Clock()
    view = LocalView(clock=clock)
    before, tails = chain(20), [chain(8, tag) for tag in range(1, 5)]
    view.settle(view.note(A, before), ttl_s=600)
    notes = burst(view, clock, [before + chain(30, 9) + tail for tail in tails])
    for i in order:
        if i == 2:
            view.settle(notes[i], ttl_s=600)
        else:
            view.unsay(notes[i])
    assert view.depth(A, notes[2].keys) == 58
    assert [view.depth(A, notes[i].keys) for i in (0, 1, 3)] == [50, 50, 50]


def test_a_request_that_is_still_under_way_keeps_what_another_was_refused_with() -> None:
    clock = Clock()
    view = LocalView(clock=clock)
    keys = chain(40)
    first, second = burst(view, clock, [keys[:30], keys])
    view.unsay(first)
    assert view.depth(A, keys) == 40
    view.unsay(second)
    assert view.depth(A, keys) == 0


def test_a_refusal_takes_back_nothing_that_was_heard_or_removed_since() -> None:
    clock = Clock()
    view = LocalView(clock=clock)
    keys = chain(40)
    (refused,) = burst(view, clock, [keys])
    view.removed(A, keys[30:])
    view.heard(A, keys[:10], ttl_s=60)
    view.unsay(refused)
    assert view.depth(A, keys) == 10


def test_a_note_is_forgotten_with_its_request() -> None:
    view = LocalView(clock=Clock())
    kept = view.note(A, chain(3))
    for tag in range(100):
        view.note(A, chain(3, tag))
    assert len(view._open[A]) == 1
    view.settle(kept, ttl_s=1)
    assert not view._open
