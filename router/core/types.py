"""The nouns: who a worker is, what a block is called, what may be told to an index. Pure.

May import: the standard library and msgspec.
"""

from typing import Literal, NewType, Protocol

import msgspec

BlockKey = NewType("BlockKey", bytes)
"""8 bytes: xxh3-64 of everything that decides the KV content of one full block, its whole prefix included."""

Tier = Literal["gpu", "cpu", "storage"]
"""Where a pod keeps a block. vLLM's `medium`: GPU, CPU, anything else."""
TIERS: tuple[Tier, ...] = ("gpu", "cpu", "storage")


class WorkerAddress(msgspec.Struct, frozen=True, order=True):
    """What a request can be sent to: one data-parallel rank of one pod.

    `pod` is the pod's identity: its normalised URL, or its UID in Kubernetes. A restart does not change the address.
    """

    pod: str
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.pod}#{self.rank}"


class WorkerId(msgspec.Struct, frozen=True, order=True):
    """One life of a worker: its cache began empty and has not been forgotten since.

    `incarnation` is minted by the owner of the worker's index; a restart, a clear or a lost sequence makes a new one.
    """

    address: WorkerAddress
    incarnation: str


class Add(msgspec.Struct, frozen=True):
    """The worker now holds these blocks on `tier`."""

    keys: tuple[BlockKey, ...]
    tier: Tier = "gpu"


class Remove(msgspec.Struct, frozen=True):
    """The worker has no copy of these blocks left on `tier`."""

    keys: tuple[BlockKey, ...]
    tier: Tier = "gpu"


class Clear(msgspec.Struct, frozen=True):
    """Nothing this worker was said to hold counts any longer: it gets a new slot."""


IndexOp = Add | Remove | Clear


class IndexUnavailable(Exception):
    """The index could not answer within its deadline. `reason` is a metric label, so it comes from a closed set.

    `words` are the store's own, for the operator: NOAUTH, NOPERM, MOVED and OOM each have another cure.
    """

    def __init__(
        self, reason: Literal["deadline", "breaker_open", "connection", "busy", "reply"], words: str = ""
    ) -> None:
        super().__init__(f"{reason} ({words})" if words else reason)
        self.reason = reason


class Clock(Protocol):
    """Monotonic seconds, handed in so that tests need no patching."""

    def __call__(self) -> float: ...
