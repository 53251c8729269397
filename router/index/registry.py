"""The registry hash of the Redis store as a value: which slot is whose. Pure.

May import: msgspec, router.core, router.index.lua (names only).
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from router.core.types import TIERS, Tier, WorkerAddress
from router.index.lua import MAX_SLOTS

UNATTENDED_AFTER_S = 10.0  # a lease lasts 3 s, and a standby takes over within 5


class Registry(msgspec.Struct, frozen=True):
    """What HGETALL of the registry says. `version` is what the version key holds while this is current."""

    version: bytes = b""
    epoch: str = ""
    names: Mapping[int, WorkerAddress] = {}
    lives: Mapping[WorkerAddress, str] = {}
    sizes: Mapping[WorkerAddress, int] = {}
    leases: Mapping[WorkerAddress, str] = {}  # whatever they say: a live indexer renews them twice a second
    live_mask: int = 0
    retired_slots: int = 0
    tiers: tuple[Tier, ...] = ("gpu",)


EMPTY = Registry()


def parse_registry(flat: Sequence[bytes]) -> Registry:
    """From a HGETALL reply (field, value, field, ...). Fields that we never wrote are passed over."""
    fields = {
        flat[i].decode("utf-8", "replace"): flat[i + 1].decode("utf-8", "replace") for i in range(0, len(flat), 2)
    }
    epoch = fields.get("epoch")
    if epoch is None:
        return EMPTY
    names: dict[int, WorkerAddress] = {}
    lives: dict[WorkerAddress, str] = {}
    sizes: dict[WorkerAddress, int] = {}
    leases: dict[WorkerAddress, str] = {}
    for field, value in fields.items():
        kind, rest = field[:2], field[2:]
        with contextlib.suppress(ValueError):
            if kind == "s:" and 0 <= int(rest) < MAX_SLOTS:
                names[int(rest)] = address_of(value)
            elif kind == "a:":
                lives[address_of(rest)] = value
            elif kind == "o:":
                leases[address_of(rest)] = value
            elif kind == "b:" and int(value) > 0:
                sizes[address_of(rest)] = int(value)
    known = set(fields.get("tiers", "gpu").split(","))
    return Registry(
        version=f"{epoch}:{fields.get('n', '')}".encode(),
        epoch=epoch,
        names=names,
        lives=lives,
        sizes=sizes,
        leases=leases,
        live_mask=sum(1 << slot for slot in names),
        retired_slots=sum(f.startswith("r:") for f in fields),
        tiers=tuple(t for t in TIERS if t in known or t == "gpu"),
    )


class Attendance:
    """Which workers' leases are still renewed, told by their changing: no clock but the reader's own is needed."""

    def __init__(self) -> None:
        self._seen: dict[WorkerAddress, tuple[str, float]] = {}  # the lease, and since when it is this one

    def unattended(self, registry: Registry, now_s: float, expected: Iterable[WorkerAddress] = ()) -> int:
        """How many workers, live or `expected` to be, no indexer has written for since `UNATTENDED_AFTER_S`."""
        seen, self._seen = self._seen, {}
        for address in {*registry.lives, *expected}:
            lease = registry.leases.get(address, "")
            known = seen.get(address)
            self._seen[address] = known if known is not None and known[0] == lease else (lease, now_s)
        return sum(now_s - since_s >= UNATTENDED_AFTER_S for _, since_s in self._seen.values())


def address_of(text: str) -> WorkerAddress:
    """The inverse of str(WorkerAddress). Raises ValueError."""
    pod, _, rank = text.rpartition("#")
    return WorkerAddress(pod, int(rank))
