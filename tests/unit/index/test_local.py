"""What this router routed lately: depth, ends, forgetting, bounds; and the estimate of a working set."""

from random import Random

import pytest

from router.core.types import BlockKey, WorkerAddress
from router.index.local import LocalView

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
