"""Kubernetes' JSON, only the fields that matter here, and label selectors. Pure.

Decoded with msgspec instead of the client's models: a list of a hundred pods is read on the router's event loop once
a minute, and must not be felt by a request. May import: the standard library, msgspec.
"""

import re
from collections.abc import Mapping
from typing import Literal

import msgspec


class Wire(msgspec.Struct, frozen=True, rename="camel"):
    """Unknown fields are skipped; Go writes `null` for an empty list in places, hence the `| None`."""


class Meta(Wire, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None

    @property
    def key(self) -> str:
        """The store's key: a recreated pod takes its namesake's place even if the deletion was never told."""
        return f"{self.namespace}/{self.name}"


class ContainerPort(Wire, frozen=True):
    container_port: int
    name: str | None = None
    protocol: str | None = None


class Container(Wire, frozen=True):
    name: str = ""
    ports: list[ContainerPort] | None = None


class Running(Wire, frozen=True):
    started_at: str | None = None


class ContainerState(Wire, frozen=True):
    running: Running | None = None
    terminated: Running | None = None


class ContainerStatus(Wire, frozen=True):
    name: str = ""
    restart_count: int = 0
    container_id: str | None = msgspec.field(default=None, name="containerID")
    state: ContainerState | None = None
    last_state: ContainerState | None = None


class Condition(Wire, frozen=True):
    type: str = ""
    status: str = ""


class PodSpecWire(Wire, frozen=True):
    containers: list[Container] | None = None


class PodStatus(Wire, frozen=True):
    phase: str = ""
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[Condition] | None = None
    container_statuses: list[ContainerStatus] | None = None


class KubeObject(Wire, frozen=True):
    metadata: Meta


class KubePod(KubeObject, frozen=True):
    spec: PodSpecWire = PodSpecWire()
    status: PodStatus = PodStatus()


class EndpointConditions(Wire, frozen=True):
    ready: bool | None = None
    terminating: bool | None = None


class TargetRef(Wire, frozen=True):
    kind: str | None = None
    name: str | None = None
    uid: str | None = None


class Endpoint(Wire, frozen=True):
    addresses: list[str] | None = None
    conditions: EndpointConditions | None = None
    target_ref: TargetRef | None = None


class EndpointPort(Wire, frozen=True):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class EndpointSlice(KubeObject, frozen=True):
    address_type: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[EndpointPort] | None = None


class ServiceSpec(Wire, frozen=True):
    selector: dict[str, str] | None = None


class Service(KubeObject, frozen=True):
    spec: ServiceSpec = ServiceSpec()


class ListMeta(Wire, frozen=True):
    resource_version: str | int | None = None  # opaque
    continue_: str | None = msgspec.field(default=None, name="continue")


class Page(Wire, frozen=True):
    """One page of a list; the items are decoded one by one, so that a strange one costs only itself."""

    metadata: ListMeta = ListMeta()
    items: list[msgspec.Raw] | None = None


class WatchEvent(Wire, frozen=True):
    type: str
    object: msgspec.Raw


class Status(Wire, frozen=True):
    """The API server's error object, as the body of an error reply or inside an ERROR event."""

    code: int | None = None
    reason: str | None = None
    message: str | None = None


class Requirement(msgspec.Struct, frozen=True):
    """One part of a label selector."""

    key: str
    op: Literal["in", "notin", "exists", "absent"]
    values: frozenset[str] = frozenset()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """As the API server decides it: `!=` and `notin` hold for an absent label too."""
        value = labels.get(self.key)
        match self.op:
            case "in":
                return value is not None and value in self.values
            case "notin":
                return value is None or value not in self.values
            case "exists":
                return value is not None
            case "absent":
                return value is None


class Selector(msgspec.Struct, frozen=True):
    """A label selector; the watch's own filter is checked again here, since a lost label must take a pod out."""

    requirements: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str] | None) -> bool:
        """Whether an object with these labels belongs."""
        return all(requirement.matches(labels or {}) for requirement in self.requirements)


_KEY = r"[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?"
_REQUIREMENT = re.compile(
    rf"\s*(?:(?P<absent>!)\s*(?P<no_key>{_KEY})"
    rf"|(?P<set_key>{_KEY})\s+(?P<set>in|notin)\s*\((?P<values>[^()]*)\)"
    rf"|(?P<key>{_KEY})\s*(?P<op>==|=|!=)\s*(?P<value>[A-Za-z0-9._-]*)"
    rf"|(?P<has_key>{_KEY}))\s*(?:,(?=\s*\S)|$)"
)


def parse_selector(text: str) -> Selector:
    """`app=vllm,tier in (a, b),!canary`, as kubectl takes it. Raises ValueError with the cure."""
    found: list[Requirement] = []
    at = 0
    while at < len(text):
        match = _REQUIREMENT.match(text, at)
        if match is None:
            raise ValueError(
                f"--selector {text!r} is not understood from {text[at:]!r} on; write it as for kubectl -l, "
                "for example app=vllm,tier!=canary"
            )
        found.append(_requirement(match))
        at = match.end()
    if not found:
        raise ValueError("--selector is empty and would take every pod of the namespace; give labels such as app=vllm")
    return Selector(tuple(found))


def _requirement(match: re.Match[str]) -> Requirement:
    part = match.groupdict()
    if part["absent"]:
        return Requirement(part["no_key"], "absent")
    if part["set"]:
        values = frozenset(v.strip() for v in part["values"].split(","))
        return Requirement(part["set_key"], "in" if part["set"] == "in" else "notin", values)
    if part["op"]:
        return Requirement(part["key"], "notin" if part["op"] == "!=" else "in", frozenset([part["value"]]))
    return Requirement(part["has_key"], "exists")
