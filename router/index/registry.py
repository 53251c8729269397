"""The registry hash of the Redis store as a value: which slot is whose. Pure.

May import: msgspec, router.core, router.index.lua (names only).
"""

from collections.abc import Mapping, Sequence

import msgspec

from router.core.types import TIERS, Tier, WorkerAddress


class Registry(msgspec.Struct, frozen=True):
    """What HGETALL of the registry says. `version` is what the version key holds while this is current."""

    version: bytes = b""
    epoch: str = ""
    names: Mapping[int, WorkerAddress] = {}
    lives: Mapping[WorkerAddress, str] = {}
    sizes: Mapping[WorkerAddress, int] = {}
    live_mask: int = 0
    retired_slots: int = 0
    tiers: tuple[Tier, ...] = ("gpu",)


EMPTY = Registry()


def parse_registry(flat: Sequence[bytes]) -> Registry:
    """From a HGETALL reply (field, value, field, ...). Empty: EMPTY. Raises ValueError for strange fields."""
    fields = {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat) - 1, 2)}
    epoch = fields.get("epoch")
    if epoch is None:
        return EMPTY
    names = {int(f[2:]): address_of(v) for f, v in fields.items() if f.startswith("s:")}
    known = set(fields.get("tiers", "gpu").split(","))
    return Registry(
        version=f"{epoch}:{fields.get('n', '')}".encode(),
        epoch=epoch,
        names=names,
        lives={address_of(f[2:]): v for f, v in fields.items() if f.startswith("a:")},
        sizes={address_of(f[2:]): int(v) for f, v in fields.items() if f.startswith("b:")},
        live_mask=sum(1 << slot for slot in names),
        retired_slots=sum(f.startswith("r:") for f in fields),
        tiers=tuple(t for t in TIERS if t in known or t == "gpu"),
    )


def address_of(text: str) -> WorkerAddress:
    """The inverse of str(WorkerAddress). Raises ValueError."""
    pod, _, rank = text.rpartition("#")
    return WorkerAddress(pod, int(rank))
