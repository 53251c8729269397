"""Packed tables for the Ledger: 64-bit name -> 64-bit value and four 16-bit counts, in arrays. Pure.

A dict of Python ints takes 138 bytes a block and more; these take 54 to 107 for both of the Ledger's, and stay out of
the garbage collector's sight. Open addressing with linear probing, split into 64 parts by the top bits of the name, so
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
    """One part. `names[i] == 0` is an empty place; the caller never uses the name 0. Without `valued`, counts only."""

    __slots__ = ("_limit", "_mask", "_valued", "counts", "names", "used", "values")

    def __init__(self, size: int = _FIRST_SIZE, *, valued: bool = True) -> None:
        self.names = array("Q", bytes(8 * size))
        self.values = array("Q", bytes(8 * size if valued else 0))
        self.counts = array("Q", bytes(8 * size))
        self.used = 0
        self._valued = valued
        self._mask = size - 1
        self._limit = int(size * _FULL)

    def find(self, name: int) -> int:
        """The place of a name; if it is not there, ~place of where it would go. Good until the next put or remove."""
        names, mask = self.names, self._mask
        i = name & mask
        while there := names[i]:
            if there == name:
                return i
            i = (i + 1) & mask
        return ~i

    def put(self, i: int, name: int, value: int, counts: int) -> None:
        """Fill the place ~`i` that `find` gave for a name that was not there."""
        if self.used >= self._limit:
            self._grow()
            i = self.find(name)
        self.names[~i] = name
        if self._valued:
            self.values[~i] = value
        self.counts[~i] = counts
        self.used += 1

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
                names[hole], counts[hole] = name, counts[j]
                if self._valued:
                    values[hole] = values[j]
                hole = j
        names[hole] = 0
        self.used -= 1

    def _grow(self) -> None:
        names, values, counts = self.names, self.values, self.counts
        self.__init__(2 * len(names), valued=self._valued)  # type: ignore[misc]
        to_names, to_values, to_counts, mask = self.names, self.values, self.counts, self._mask
        for at, name in enumerate(names):
            if name:
                i = name & mask
                while to_names[i]:
                    i = (i + 1) & mask
                to_names[i], to_counts[i] = name, counts[at]
                if self._valued:
                    to_values[i] = values[at]
                self.used += 1

    def load(self, names: bytes, values: bytes, counts: bytes) -> None:
        """Take over arrays that another part of the same name range had."""
        self.__init__(len(names) // 8)  # type: ignore[misc]
        self.names, self.values, self.counts = array("Q", names), array("Q", values), array("Q", counts)
        self.used = sum(1 for name in self.names if name)

    def places(self) -> Iterator[int]:
        """Every place in use. Nothing may be inserted or removed meanwhile."""
        return (i for i, name in enumerate(self.names) if name)


def new_table(*, valued: bool = True) -> list[Part]:
    """64 empty parts; a name's part is `table[name >> SHIFT]`."""
    return [Part(valued=valued) for _ in range(1 << PARTS_BITS)]


def table_bytes(table: list[Part]) -> int:
    """What the arrays of a table take."""
    return sum(8 * (2 * len(part.names) + len(part.values)) for part in table)
