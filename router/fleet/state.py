"""Who is alive: FleetState.apply(event) -> FleetState. Pure.

May import: the standard library, msgspec, router.core.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from router.core.types import WorkerAddress

NotReady = Literal["starting", "health", "models", "connect", "gone", "terminating", "not_ready"]
"""Why a pod gets no requests. Closed: it is a metric label."""


class PodSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A pod as configured or discovered. `identity` is its normalised URL, or its UID in Kubernetes."""

    identity: str
    name: str
    url: str
    events: str | None = None  # ZMQ endpoint of rank 0; rank r is at port + r
    replay: str | None = None
    ranks: int = 1
    model: str | None = None  # base model id given by hand: overrides what /v1/models says
    ready: bool = True  # what the discovery thinks (Kubernetes' Ready condition)
    terminating: bool = False
    incarnation: str = ""  # container start or the like, "" when the discovery does not know


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a pod's /v1/models, as far as routing needs it; `raw` is the entry as the pod gave it."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len_tokens: int | None = None
    raw: dict[str, Any] = msgspec.field(default_factory=dict)


class EventSource(msgspec.Struct, frozen=True):
    """A pod's answer to GET /kv_event_sources (vLLM >= 0.32), hosts filled in. Empty: it publishes nothing.

    Each rank's own (events, replay): with port 0 in its settings the system chooses each rank's port by itself.
    """

    endpoints: tuple[tuple[str | None, str | None], ...] = ()

    @property
    def ranks(self) -> int:
        return max(len(self.endpoints), 1)


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod as known now."""

    spec: PodSpec
    models: tuple[ModelEntry, ...] = ()
    not_ready: NotReady | None = "starting"
    detail: str = ""
    started_at_s: float | None = None  # process_start_time_seconds of its /metrics
    block_size_tokens: int | None = None  # cache_config_info
    source: "EventSource | None" = None  # what the pod itself says of its KV events, when nobody configured it

    @property
    def workers(self) -> tuple[WorkerAddress, ...]:
        """One address a data-parallel rank."""
        return tuple(WorkerAddress(self.spec.identity, rank) for rank in range(self.ranks))

    @property
    def ranks(self) -> int:
        return max(self.spec.ranks, self.source.ranks if self.source else 1)

    @property
    def publishes(self) -> bool:
        """It was configured, or it said itself, where its KV events are."""
        told = self.source.endpoints if self.source else ()
        return self.spec.events is not None or any(events is not None for events, _ in told)

    @property
    def serving(self) -> bool:
        return self.not_ready is None

    def entry(self, name: str) -> ModelEntry | None:
        """The /v1/models entry called `name`."""
        return next((m for m in self.models if m.id == name), None)

    def base_model(self, name: str | None) -> str | None:
        """The id that keys and tokenizer go by: one for all served names of a base model, its adapters included."""
        if self.spec.model is not None:
            return self.spec.model
        entry = self.entry(name) if name is not None else next((m for m in self.models if m.parent is None), None)
        if entry is not None and entry.parent is not None:
            entry = self.entry(entry.parent) or next((m for m in self.models if m.parent is None), None)
        return None if entry is None else entry.root or entry.id

    def lora_name(self, name: str | None) -> str | None:
        """The adapter's name when `name` is one, as the pod's KV events will give it."""
        entry = self.entry(name) if name is not None else None
        return entry.id if entry is not None and entry.parent is not None else None


class Seen(msgspec.Struct, frozen=True):
    """Configured or discovered, or changed there."""

    spec: PodSpec


class Gone(msgspec.Struct, frozen=True):
    """Taken out of the configuration, deleted, or lost its label."""

    identity: str


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of asking the pod. Fields left None keep what was known."""

    identity: str
    not_ready: NotReady | None
    detail: str = ""
    models: tuple[ModelEntry, ...] | None = None
    started_at_s: float | None = None
    block_size_tokens: int | None = None
    source: EventSource | None = None


FleetEvent = Seen | Gone | Probed


class FleetState(msgspec.Struct, frozen=True):
    """All pods by identity, in the order in which they were first seen."""

    pods: Mapping[str, Pod] = MappingProxyType({})

    def apply(self, event: FleetEvent) -> "FleetState":
        """The state after `event`; the same object when nothing changes. Events about unknown pods do nothing."""
        match event:
            case Seen(spec=spec):
                return self._seen(spec)
            case Gone(identity=identity):
                if identity not in self.pods:
                    return self
                return FleetState(MappingProxyType({k: p for k, p in self.pods.items() if k != identity}))
            case Probed():
                return self._probed(event)

    def _seen(self, spec: PodSpec) -> "FleetState":
        old = self.pods.get(spec.identity)
        if old is not None and old.spec == spec:
            return self
        restarted = old is not None and old.spec.incarnation != spec.incarnation
        pod = Pod(spec=spec) if old is None or restarted else msgspec.structs.replace(old, spec=spec)
        if spec.terminating:
            pod = msgspec.structs.replace(pod, not_ready="terminating")
        elif not spec.ready:
            pod = msgspec.structs.replace(pod, not_ready="not_ready")
        elif pod.not_ready in ("terminating", "not_ready"):
            pod = msgspec.structs.replace(pod, not_ready="starting")
        return self._with(pod)

    def _probed(self, event: Probed) -> "FleetState":
        old = self.pods.get(event.identity)
        if old is None:
            return self
        not_ready = event.not_ready
        if old.spec.terminating:
            not_ready = "terminating"
        elif not old.spec.ready:
            not_ready = "not_ready"
        pod = msgspec.structs.replace(
            old,
            not_ready=not_ready,
            detail=event.detail,
            models=old.models if event.models is None else event.models,
            started_at_s=event.started_at_s if event.started_at_s is not None else old.started_at_s,
            block_size_tokens=event.block_size_tokens or old.block_size_tokens,
            source=event.source or old.source,
        )
        return self if pod == old else self._with(pod)

    def _with(self, pod: Pod) -> "FleetState":
        pods = dict(self.pods)
        pods[pod.spec.identity] = pod
        return FleetState(MappingProxyType(pods))
