"""Kubernetes objects -> usable pods, as tables; no socket, no clock."""

from typing import Any

import msgspec
import pytest

from router.fleet.k8s_objects import EndpointSlice, KubePod, parse_selector
from router.fleet.k8s_pods import Found, Ports, pods_by_selector, pods_by_service
from tests.fakes import kube_api as k

NOTHING_SET = Ports()


def by_selector(*pods: dict[str, Any], ports: Ports = NOTHING_SET) -> Found:
    return pods_by_selector([msgspec.convert(p, KubePod) for p in pods], ports)


def by_service(slices: list[dict[str, Any]], *pods: dict[str, Any], ports: Ports = NOTHING_SET) -> Found:
    known = {p["metadata"]["uid"]: msgspec.convert(p, KubePod) for p in pods}
    return pods_by_service([msgspec.convert(s, EndpointSlice) for s in slices], known, ports)


@pytest.mark.parametrize(
    ("pod", "ready", "terminating"),
    [
        pytest.param(k.pod("a", uid="u"), True, False, id="ready"),
        pytest.param(k.pod("a", uid="u", ready=False), False, False, id="H24 running is not ready"),
        pytest.param(k.pod("a", uid="u", deleting=True), True, True, id="H23 ready, but being deleted"),
        pytest.param(k.pod("a", uid="u", phase="Pending"), False, False, id="pending"),
        pytest.param(k.pod("a", uid="u", phase="Unknown"), False, False, id="its node is lost"),
    ],
)
def test_what_a_pod_is_good_for(pod: dict[str, Any], ready: bool, terminating: bool) -> None:
    (found,) = by_selector(pod).pods
    assert (found.identity, found.name, found.url) == ("u", "a", "http://10.0.0.1:8000")
    assert (found.ready, found.terminating) == (ready, terminating)


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(k.pod("a", uid="u", phase="Failed"), id="evicted, still with its address"),
        pytest.param(k.pod("a", ip=None, uid="u", phase="Failed"), id="evicted, without address"),
        pytest.param(k.pod("a", ip="", uid="u"), id="empty address"),
        pytest.param(k.pod("a", ip=None, uid="u", phase="Pending"), id="no address yet"),
        pytest.param(k.pod("a", uid="u", phase="Succeeded"), id="done"),
    ],
)
def test_no_address_or_finished_is_no_pod(pod: dict[str, Any]) -> None:
    assert by_selector(pod).pods == ()


SIDECAR_FIRST = [{"name": "http-envoy-prom", "containerPort": 15090}, {"containerPort": 8000}]
HTTP_SECOND = [{"name": "metrics", "containerPort": 9000}, {"name": "http", "containerPort": 8080}]


@pytest.mark.parametrize(
    ("declared", "ports", "annotations", "url", "events", "replay"),
    [
        pytest.param(HTTP_SECOND, Ports(), {}, ":8080", None, None, id="the port named http"),
        pytest.param(HTTP_SECOND[:1], Ports(), {}, ":9000", None, None, id="else the first"),
        pytest.param(SIDECAR_FIRST, Ports(), {}, ":8000", None, None, id="a sidecar's port before vLLM's own"),
        pytest.param([], Ports(), {}, ":8000", None, None, id="else vLLM's own"),
        pytest.param([{"containerPort": 53, "protocol": "UDP"}], Ports(), {}, ":8000", None, None, id="UDP is none"),
        pytest.param(HTTP_SECOND, Ports(http=1234), {}, ":1234", None, None, id="the setting wins over the pod"),
        pytest.param(
            HTTP_SECOND,
            Ports(http=1234, events=5557, replay=5558),
            {"warmroute.dev/port": "7", "warmroute.dev/events-port": "8", "warmroute.dev/replay-port": "9"},
            ":7",
            8,
            9,
            id="what the pod says of itself wins over the setting",
        ),
        pytest.param(
            [*HTTP_SECOND, {"name": "kv-events", "containerPort": 5557}, {"name": "kv-replay", "containerPort": 5558}],
            Ports(),
            {},
            ":8080",
            5557,
            5558,
            id="ports named kv-events and kv-replay",
        ),
    ],
)
@pytest.mark.parametrize(("ip", "host"), [("10.0.0.1", "10.0.0.1"), ("fd00::7", "[fd00::7]")])
def test_ports(
    declared: list[dict[str, Any]],
    ports: Ports,
    annotations: dict[str, str],
    url: str,
    events: int | None,
    replay: int | None,
    ip: str,
    host: str,
) -> None:
    (pod,) = by_selector(k.pod("a", ip, uid="u", ports=declared, annotations=annotations), ports=ports).pods
    assert pod.url == f"http://{host}{url}"
    assert pod.events == (f"tcp://{host}:{events}" if events else None)
    assert pod.replay == (f"tcp://{host}:{replay}" if replay else None)


def test_ranks_and_model_come_from_annotations() -> None:
    (pod,) = by_selector(
        k.pod("a", uid="u", annotations={"warmroute.dev/ranks": "4", "warmroute.dev/model": " Qwen/Qwen3-32B "})
    ).pods
    assert (pod.ranks, pod.model) == (4, "Qwen/Qwen3-32B")


@pytest.mark.parametrize("value", ["", "0", "70000", "http", "-1", "٣", "8" * 400])
def test_a_bad_annotation_is_told_and_else_ignored(value: str) -> None:
    found = by_selector(k.pod("a", uid="u", annotations={"warmroute.dev/events-port": value}), ports=Ports(events=5557))
    assert [p.events for p in found.pods] == ["tcp://10.0.0.1:5557"]
    assert len(found.problems) == (1 if value else 0)
    assert all("pod a" in problem and len(problem) < 200 for problem in found.problems)


def test_incarnation_is_the_container_start_and_nothing_else() -> None:
    def incarnation(**changes: Any) -> str:
        (pod,) = by_selector(k.pod("a", uid="u", **changes)).pods
        return pod.incarnation

    first = incarnation()
    assert first
    assert incarnation(ready=False) == incarnation(labels={"x": "y"}) == first
    assert incarnation(restarts=1, started_at="2026-01-01T00:09:00Z") != first
    assert incarnation(restarts=1) != first, "a restart within the same second"
    assert incarnation(started_at="2026-01-01T00:09:00Z") != first
    assert incarnation(ip="10.9.9.9") != first, "H26: what another address held is not here"


def test_a_crashed_container_keeps_its_incarnation_until_it_runs_again() -> None:
    running = k.pod("a", uid="u")
    crashed, waiting = k.pod("a", uid="u", ready=False), k.pod("a", uid="u", ready=False)
    start = {"startedAt": "2026-01-01T00:00:00Z", "exitCode": 137}
    crashed["status"]["containerStatuses"][0]["state"] = {"terminated": start}
    waiting["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    waiting["status"]["containerStatuses"][0]["lastState"] = {"terminated": start}
    assert len({by_selector(p).pods[0].incarnation for p in (running, crashed, waiting)}) == 1


def test_a_sidecars_restart_is_not_the_engines() -> None:
    pod = k.pod("a", uid="u")
    before = by_selector(pod).pods[0].incarnation
    pod["spec"]["containers"].insert(0, {"name": "proxy", "ports": [{"name": "admin", "containerPort": 15000}]})
    sidecar = {"name": "proxy", "restartCount": 7, "state": {"running": {"startedAt": "2026-02-01T00:00:00Z"}}}
    pod["status"]["containerStatuses"].insert(0, sidecar)
    (found,) = by_selector(pod).pods
    assert (found.incarnation, found.url) == (before, "http://10.0.0.1:8000")


def test_a_reused_address_belongs_to_the_newest_living_pod() -> None:
    old = k.pod("a", uid="old", created_at="2026-01-01T00:00:00Z")
    new = k.pod("b", uid="new", created_at="2026-01-02T00:00:00Z")
    assert [p.identity for p in by_selector(new, old).pods] == ["new"]
    leaving = k.pod("b", uid="new", created_at="2026-01-02T00:00:00Z", deleting=True)
    assert [p.identity for p in by_selector(leaving, old).pods] == ["old"]


def test_nulls_of_go_are_empty_lists() -> None:
    pod = k.pod("a", uid="u")
    pod["metadata"]["labels"] = pod["status"]["conditions"] = pod["status"]["containerStatuses"] = None
    pod["spec"]["containers"][0]["ports"] = None
    (found,) = by_selector(pod).pods
    assert (found.ready, found.incarnation, found.url) == (False, "10.0.0.1", "http://10.0.0.1:8000")
    assert by_service([k.endpoint_slice("s", None)]).pods == ()


# ---- Services ----

A = k.pod("a", "10.0.0.1", uid="ua")


@pytest.mark.parametrize(
    ("endpoints", "expected"),
    [
        pytest.param([k.endpoint(A)], [("ua", True, False)], id="ready"),
        pytest.param([k.endpoint(A, ready=None)], [("ua", True, False)], id="no word on readiness means ready"),
        pytest.param([k.endpoint(A, ready=False)], [("ua", False, False)], id="not ready"),
        pytest.param([k.endpoint(A, ready=False, terminating=True)], [("ua", False, True)], id="terminating"),
        pytest.param([k.endpoint(A, ready=True, terminating=True)], [("ua", True, True)], id="H23 ready terminating"),
        pytest.param([{**k.endpoint(A), "addresses": []}], [], id="no address"),
        pytest.param([{**k.endpoint(A), "addresses": [""]}], [], id="empty address"),
    ],
)
@pytest.mark.parametrize("enriched", [False, True])
def test_conditions_of_an_endpoint(endpoints: list[dict[str, Any]], expected: list[Any], enriched: bool) -> None:
    found = by_service([k.endpoint_slice("s", endpoints)], *([A] if enriched else []))
    assert [(p.identity, p.ready, p.terminating) for p in found.pods] == expected


def test_the_pod_itself_knows_more_than_its_endpoint() -> None:
    slices = [k.endpoint_slice("s", [k.endpoint(A)])]
    deleted = by_service(slices, k.pod("a", uid="ua", deleting=True)).pods
    assert [(p.ready, p.terminating) for p in deleted] == [(True, True)], "the slice lags behind the deletion"
    assert by_service(slices, k.pod("a", uid="ua", phase="Failed")).pods == ()
    (pod,) = by_service(slices, k.pod("a", uid="ua", annotations={"warmroute.dev/ranks": "2"})).pods
    assert (pod.ranks, "2026" in pod.incarnation) == (2, True)


def test_a_pod_in_two_slices_is_one_pod() -> None:
    moving = [k.endpoint_slice("s1", [k.endpoint(A, ready=False)]), k.endpoint_slice("s2", [k.endpoint(A)])]
    assert [(p.identity, p.ready) for p in by_service(moving).pods] == [("ua", True)]
    leaving = [k.endpoint_slice("s1", [k.endpoint(A)]), k.endpoint_slice("s2", [k.endpoint(A, terminating=True)])]
    assert [p.terminating for p in by_service(leaving).pods] == [True]


def test_of_two_address_families_ipv4_is_used() -> None:
    slices = [
        k.endpoint_slice("s6", [k.endpoint(A, address="fd00::7")], address_type="IPv6"),
        k.endpoint_slice("s4", [k.endpoint(A)]),
    ]
    assert [p.url for p in by_service(slices).pods] == ["http://10.0.0.1:8000"]
    assert [p.url for p in by_service(slices[:1]).pods] == ["http://[fd00::7]:8000"]


def test_an_endpoint_without_a_pod_is_known_by_its_address() -> None:
    outside = {"addresses": ["192.0.2.5"], "conditions": {"ready": True}}
    piece = k.endpoint_slice("s", [outside], port=8001)
    piece["ports"].append({"name": "kv-events", "port": 5557})
    (pod,) = by_service([piece]).pods
    assert (pod.identity, pod.url, pod.events) == (pod.url, "http://192.0.2.5:8001", "tcp://192.0.2.5:5557")


# ---- selectors: the oracle is what kubectl's documentation says of each form ----

SELECTORS = [
    ("app=vllm", {"app": "vllm"}, True),
    ("app==vllm", {"app": "vllm"}, True),
    ("app = vllm", {"app": "vllm"}, True),
    ("app=vllm", {"app": "other"}, False),
    ("app=vllm", {}, False),
    ("app!=vllm", {}, True),
    ("app!=vllm", {"app": "vllm"}, False),
    ("app", {"app": ""}, True),
    ("app", {}, False),
    ("!app", {}, True),
    ("!app", {"app": "x"}, False),
    ("app in (a, b)", {"app": "b"}, True),
    ("app in (a,b)", {"app": "c"}, False),
    ("app notin (a,b)", {"app": "a"}, False),
    ("app notin (a,b)", {}, True),
    ("a=1,b in (x),!c", {"a": "1", "b": "x"}, True),
    ("a=1,b in (x),!c", {"a": "1", "b": "x", "c": ""}, False),
    ("app.kubernetes.io/name=vllm, tier", {"app.kubernetes.io/name": "vllm", "tier": "gpu"}, True),
    ("in=1", {"in": "1"}, True),
    ("a=", {"a": ""}, True),
]


@pytest.mark.parametrize(("text", "labels", "expected"), SELECTORS)
def test_selectors(text: str, labels: dict[str, str], expected: bool) -> None:
    assert parse_selector(text).matches(labels) is expected


@pytest.mark.parametrize(
    "text", ["", "  ", ",", "a=1,", "a=1,,b=2", "a in", "a in b", "a=1 b=2", "=1", "a>1", "a in (x"]
)
def test_a_bad_selector_is_refused_with_the_cure(text: str) -> None:
    with pytest.raises(ValueError, match="--selector"):
        parse_selector(text)
