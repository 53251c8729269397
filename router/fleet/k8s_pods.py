"""Kubernetes objects -> the pods a request may be sent to. Pure.

May import: the standard library, msgspec, router.fleet.{state,k8s_objects}.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from router.fleet.k8s_objects import Container, ContainerPort, Endpoint, EndpointSlice, KubePod
from router.fleet.state import PodSpec

ANNOTATIONS = "warmroute.dev/"
"""Prefix of what a pod may say of itself: port, events-port, replay-port, ranks, model."""

VLLM_PORT = 8000
"""What vLLM listens on when nobody says otherwise: used for a pod that declares no port."""


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """--pod-port, --events-port, --replay-port; None: as the pod declares."""

    http: int | None = None
    events: int | None = None
    replay: int | None = None


class Found(msgspec.Struct, frozen=True):
    """The fleet as Kubernetes has it, and what an operator should hear about it."""

    pods: tuple[PodSpec, ...] = ()
    problems: tuple[str, ...] = ()


def pods_by_selector(pods: Iterable[KubePod], ports: Ports) -> Found:
    """Every pod that has an address and is not finished, terminating and unready ones included."""
    problems: list[str] = []
    specs = [(pod, spec) for pod in pods if (spec := _spec(pod, ports, problems)) is not None]
    return Found(_one_per_url(specs), tuple(problems))


def pods_by_service(slices: Iterable[EndpointSlice], pods: Mapping[str, KubePod], ports: Ports) -> Found:
    """The endpoints of a Service. `pods` by UID add what slices do not tell: restarts, annotations, deletion.

    One pod may be in two slices during a move, and in one slice per address family.
    """
    problems: list[str] = []
    by_identity: dict[str, PodSpec] = {}
    for piece in sorted(slices, key=lambda s: (s.address_type, s.metadata.name)):  # IPv4 before IPv6
        for endpoint in piece.endpoints or ():
            spec = _endpoint_spec(piece, endpoint, pods, ports, problems)
            if spec is None:
                continue
            before = by_identity.get(spec.identity, spec)
            by_identity[spec.identity] = msgspec.structs.replace(
                before, ready=before.ready or spec.ready, terminating=before.terminating or spec.terminating
            )
    known = [(pods.get(identity), spec) for identity, spec in by_identity.items()]
    return Found(_one_per_url(known), tuple(problems))


def _spec(pod: KubePod, ports: Ports, problems: list[str]) -> PodSpec | None:
    if not pod.status.pod_ip or _finished(pod):
        return None
    return _describe(
        pod,
        identity=pod.metadata.uid or pod.metadata.key,
        name=pod.metadata.name,
        ip=pod.status.pod_ip,
        http_port=ports.http or _http_port([(p.name, p.container_port) for _, p in _tcp_ports(pod)]),
        named=_named_ports(pod),
        ports=ports,
        problems=problems,
    )


def _endpoint_spec(
    piece: EndpointSlice, endpoint: Endpoint, pods: Mapping[str, KubePod], ports: Ports, problems: list[str]
) -> PodSpec | None:
    address = next((a for a in endpoint.addresses or () if a), None)
    if address is None:
        return None
    target = endpoint.target_ref
    uid = target.uid if target is not None and target.kind == "Pod" else None
    pod = pods.get(uid) if uid else None
    if pod is not None and _finished(pod):
        return None
    slice_ports = [(p.name, p.port) for p in piece.ports or () if p.port and (p.protocol or "TCP") == "TCP"]
    named = (_named_ports(pod) if pod is not None else {}) | {name: port for name, port in slice_ports if name}
    http_port = ports.http or named.get("http") or _http_port(slice_ports)
    spec = _describe(
        pod,
        identity=uid or _url(address, http_port),
        name=(target.name if target is not None and target.name else None) or _url(address, http_port),
        ip=address,
        http_port=http_port,
        named=named,
        ports=ports,
        problems=problems,
    )
    conditions = endpoint.conditions
    ready = conditions is None or conditions.ready is not False
    terminating = conditions is not None and conditions.terminating is True
    if pod is not None:
        ready, terminating = ready and spec.ready, terminating or spec.terminating
    return msgspec.structs.replace(spec, ready=ready, terminating=terminating)


def _describe(
    pod: KubePod | None,
    *,
    identity: str,
    name: str,
    ip: str,
    http_port: int,
    named: Mapping[str, int],
    ports: Ports,
    problems: list[str],
) -> PodSpec:
    said = _Annotations(name, pod.metadata.annotations if pod is not None else None, problems)
    http_port = said.number("port", 65535) or http_port
    events = said.number("events-port", 65535) or ports.events or named.get("kv-events")
    replay = said.number("replay-port", 65535) or ports.replay or named.get("kv-replay")
    return PodSpec(
        identity=identity,
        name=name,
        url=_url(ip, http_port),
        events=f"tcp://{_host(ip)}:{events}" if events else None,
        replay=f"tcp://{_host(ip)}:{replay}" if replay else None,
        ranks=said.number("ranks", 1024) or 1,
        model=said.text("model"),
        ready=pod is not None and _ready(pod),
        terminating=pod is not None and pod.metadata.deletion_timestamp is not None,
        incarnation=f"{ip} {_container_start(pod, http_port) if pod is not None else ''}".strip(),
    )


class _Annotations:
    """A pod's own words; one that cannot be used is a problem that is told, and else ignored."""

    def __init__(self, name: str, annotations: Mapping[str, str] | None, problems: list[str]) -> None:
        self._name, self._all, self._problems = name, annotations or {}, problems

    def text(self, key: str) -> str | None:
        return self._all.get(ANNOTATIONS + key, "").strip() or None

    def number(self, key: str, most: int) -> int | None:
        text = self.text(key)
        if text is None:
            return None
        if text.isascii() and text.isdecimal() and 1 <= int(text) <= most:
            return int(text)
        self._problems.append(
            f"pod {self._name}: annotation {ANNOTATIONS}{key} is {text[:40]!r}; it must be 1 to {most}"
        )
        return None


def _finished(pod: KubePod) -> bool:
    return pod.status.phase in ("Succeeded", "Failed")  # an evicted pod is Failed, with or without an address


def _ready(pod: KubePod) -> bool:
    return pod.status.phase == "Running" and any(
        c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ()
    )


def _tcp_ports(pod: KubePod) -> list[tuple[Container, ContainerPort]]:
    return [
        (container, port)
        for container in pod.spec.containers or ()
        for port in container.ports or ()
        if (port.protocol or "TCP") == "TCP"
    ]


def _named_ports(pod: KubePod) -> dict[str, int]:
    return {port.name: port.container_port for _, port in reversed(_tcp_ports(pod)) if port.name}  # the first one wins


def _http_port(declared: Sequence[tuple[str | None, int]]) -> int:
    """The port named http, else vLLM's usual one, else the first: a sidecar or a metrics port may come before."""
    named = next((port for name, port in declared if name == "http"), None)
    numbers = [port for _, port in declared]
    return named or (VLLM_PORT if VLLM_PORT in numbers or not numbers else numbers[0])


def _container_start(pod: KubePod, http_port: int) -> str:
    """Changes when the container that owns the HTTP port has started anew, and at no other time; "" if not known.

    After a crash Kubernetes moves the old start from `state` to `lastState`: while nothing runs, that one is told.
    """
    owner = next((c.name for c, p in _tcp_ports(pod) if p.container_port == http_port), None)
    if owner is None and pod.spec.containers:
        owner = pod.spec.containers[0].name
    statuses = pod.status.container_statuses or []
    status = next((s for s in statuses if s.name == owner), statuses[0] if statuses else None)
    if status is None:
        return ""
    for state in (status.state, status.last_state):
        start = state and (state.running or state.terminated)
        if start and start.started_at:
            return f"{status.restart_count}@{start.started_at}/{status.container_id or ''}"
    return ""


def _one_per_url(found: Iterable[tuple[KubePod | None, PodSpec]]) -> tuple[PodSpec, ...]:
    """An address is given to a new pod while the status of the old one still shows it: the newest living one has it."""
    best: dict[str, tuple[tuple[bool, str], PodSpec]] = {}
    for pod, spec in found:
        created = (pod.metadata.creation_timestamp if pod is not None else None) or ""
        rank = (not spec.terminating, created)
        if spec.url not in best or rank > best[spec.url][0]:
            best[spec.url] = (rank, spec)
    return tuple(sorted((spec for _, spec in best.values()), key=lambda s: (s.name, s.identity)))


def _host(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


def _url(ip: str, port: int) -> str:
    return f"http://{_host(ip)}:{port}"
