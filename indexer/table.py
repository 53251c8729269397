"""Packed tables for the Ledger: 64-bit name -> 64-bit value and four 16-bit counts, in arrays. Pure.

A dict of Python ints takes 138 bytes a block and more; this takes 40 to 107 (two tables together), and stays out of
the garbage collector's sight. Open addressing with linear probing, split into 64 parts by the top bits of the name so
that growing one part stalls nobody. Removal shifts back, so there are no tombstones.
May import: the standard library.
"""

from array import array
from collections.abc import Iterator

PARTS_BITS = 6
SHIFT = 64 - PARTS_BITS
_FIRST_SIZE = 8
_FULL = 0.75


class Part:
    """One part. `names[i] == 0` is an empty place; the caller never uses the name 0."""

    __slots__ = ("_limit", "_mask", "counts", "names", "used", "values")

    def __init__(self, size: int = _FIRST_SIZE) -> None:
        self.names = array("Q", bytes(8 * size))
        self.values = array("Q", bytes(8 * size))
        self.counts = array("Q", bytes(8 * size))
        self.used = 0
        self._mask = size - 1
        self._limit = int(size * _FULL)

    def find(self, name: int) -> int:
        """The place of a name, or -1. A place is good until the next insert or remove."""
        names, mask = self.names, self._mask
        i = name & mask
        while True:
            there = names[i]
            if there == name:
                return i
            if there == 0:
                return -1
            i = (i + 1) & mask

    def insert(self, name: int, value: int = 0) -> int:
        """A place for a name that is not there yet."""
        if self.used >= self._limit:
            self._grow()
        names, mask = self.names, self._mask
        i = name & mask
        while names[i]:
            i = (i + 1) & mask
        names[i] = name
        self.values[i] = value
        self.counts[i] = 0
        self.used += 1
        return i

    def remove(self, i: int) -> None:
        """Free a place and move back what had to be put behind it."""
        names, values, counts, mask = self.names, self.values, self.counts, self._mask
        hole = i
        j = i
        while True:
            j = (j + 1) & mask
            name = names[j]
            if name == 0:
                break
            # It may fill the hole unless its own first place lies behind the hole (cyclically).
            if ((j - (name & mask)) & mask) >= ((j - hole) & mask):
                names[hole], values[hole], counts[hole] = name, values[j], counts[j]
                hole = j
        names[hole] = 0
        self.used -= 1

    def _grow(self) -> None:
        names, values, counts = self.names, self.values, self.counts
        self.__init__(2 * len(names))  # type: ignore[misc]
        for i, name in enumerate(names):
            if name:
                self.counts[self.insert(name, values[i])] = counts[i]

    def places(self) -> Iterator[int]:
        """Every place in use. Nothing may be inserted or removed meanwhile."""
        return (i for i, name in enumerate(self.names) if name)


def new_table() -> list[Part]:
    """64 empty parts; a name's part is `table[name >> SHIFT]`."""
    return [Part() for _ in range(1 << PARTS_BITS)]


def table_bytes(table: list[Part]) -> int:
    """What the arrays of a table take."""
    return sum(3 * 8 * len(part.names) for part in table)
