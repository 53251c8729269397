"""How deep each slot goes, as a table."""

import pytest

from router.core.matching import depths, slots_of

A, B, C = 0b001, 0b010, 0b100
ALL = A | B | C


@pytest.mark.parametrize(
    ("bitmaps", "live", "expected"),
    [
        pytest.param([], ALL, {}, id="no blocks"),
        pytest.param([0], ALL, {}, id="nobody has the first"),
        pytest.param([A, A, A], ALL, {0: 3}, id="one has all"),
        pytest.param([A | B, A, 0], ALL, {1: 1, 0: 2}, id="each ends at its own gap"),
        pytest.param([B, ALL, ALL], ALL, {1: 3}, id="who lacks block 0 has nothing"),
        pytest.param([ALL, B | C, A | C, ALL], ALL, {0: 1, 1: 2, 2: 4}, id="after a gap nothing counts"),
        pytest.param([ALL, ALL], A | C, {0: 2, 2: 2}, id="only live slots"),
        pytest.param([ALL], 0, {}, id="nobody lives"),
    ],
)
def test_depths(bitmaps: list[int], live: int, expected: dict[int, int]) -> None:
    assert depths(bitmaps, live) == expected


@pytest.mark.parametrize(("bitmap", "slots"), [(0, []), (1, [0]), (1 << 4095 | 0b110, [1, 2, 4095])])
def test_slots_of(bitmap: int, slots: list[int]) -> None:
    assert list(slots_of(bitmap)) == slots
