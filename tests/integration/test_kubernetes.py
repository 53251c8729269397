"""The discovery against a stand-in API server on loopback: what field reports say happens, happens here.

The deadlines of the waits are the bounds that are promised to users; the pace of the normal loop is quickened, so that
a minute's worth of watching fits into a second.
"""

import asyncio
import random
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from router.fleet.discovery import PodSpec, RestartReason
from router.fleet.k8s_api import Credentials
from router.fleet.k8s_pods import Ports
from router.fleet.kubernetes import KubernetesDiscovery, Pace
from tests.fakes import kube_api as k
from tests.fakes.kube_api import KubeApi, kube_api

WORKING_S, SHORT_OUTAGE_S = 2.0, 10.0
SLACK_S = 8.0  # this machine may be busy with other things; the product's own waits are all below the bounds


class Listener:
    """What the fleet would hear."""

    def __init__(self) -> None:
        self.lists: list[tuple[PodSpec, ...]] = []
        self.restarts: list[RestartReason] = []
        self.fail = False

    def on_pods(self, pods: Sequence[PodSpec]) -> None:
        if self.fail:
            raise RuntimeError("the fleet stumbled")
        self.lists.append(tuple(pods))

    def synced(self, kind: str) -> None:
        pass

    def restarted(self, kind: str, reason: RestartReason) -> None:
        self.restarts.append(reason)

    @property
    def names(self) -> list[str] | None:
        """Of the pods that may take requests; None before the first list."""
        return [p.name for p in self.lists[-1] if p.ready and not p.terminating] if self.lists else None


async def until(what: Any, within_s: float) -> None:
    """Polls until it holds."""
    async with asyncio.timeout(within_s + SLACK_S):
        while not what():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def discovering(
    api: KubeApi, tmp_path: Path, *, pace: Pace | None = None, environ: dict[str, str] | None = None, **query: Any
) -> AsyncIterator[tuple[Listener, KubernetesDiscovery]]:
    listener = Listener()
    environ = environ or {"KUBECONFIG": str(api.kubeconfig(tmp_path))}
    discovery = KubernetesDiscovery(
        listener.on_pods,
        credentials=Credentials(environ, tmp_path),
        observer=listener,
        pace=pace or Pace(),
        chance=random.Random(0),
        **(query or {"selector": "app=vllm"}),
    )
    task = asyncio.create_task(discovery.run())
    try:
        yield listener, discovery
        assert not task.done(), "a discovery never ends by itself"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def api() -> AsyncIterator[KubeApi]:
    async with kube_api() as running:
        yield running


async def test_pods_come_change_and_go(api: KubeApi, tmp_path: Path) -> None:
    api.put(k.pod("a", "10.0.0.1"))
    api.put(k.pod("other", "10.0.0.9", labels={"app": "other"}))
    async with discovering(api, tmp_path, ports=Ports(events=5557), selector="app=vllm") as (heard, discovery):
        await until(lambda: heard.names == ["a"], WORKING_S)
        assert heard.lists[-1][0].events == "tcp://10.0.0.1:5557"
        await until(lambda: api.watching == 1, WORKING_S)
        b = api.put(k.pod("b", "fd00::2", ready=False))
        await until(lambda: len(heard.lists[-1]) == 2 and heard.names == ["a"], WORKING_S)
        api.put(k.pod("b", "fd00::2"))
        await until(lambda: heard.names == ["a", "b"], WORKING_S)
        assert heard.lists[-1][1].url == "http://[fd00::2]:8000"
        api.delete(b)
        await until(lambda: heard.names == ["a"], WORKING_S)
        status = discovery.status()
        assert status.synced
        assert (status.restarts, status.last_error) == (0, None)
        assert status.last_sync_age_s is not None
    assert api.asked(watch=False) == api.asked(watch=True) == 1
    watch = next(query for _, query, _ in api.requests if "watch" in query)
    assert (watch["allowWatchBookmarks"], watch["labelSelector"]) == ("true", "app=vllm")
    assert 0 < int(watch["timeoutSeconds"]) <= 60


async def test_a_long_list_comes_in_pages(api: KubeApi, tmp_path: Path) -> None:
    api.page_limit = 7
    for i in range(30):
        api.put(k.pod(f"p{i:02}", f"10.0.0.{i}"))
    async with discovering(api, tmp_path) as (heard, _):
        await until(lambda: heard.names is not None, WORKING_S)
        assert heard.names == [f"p{i:02}" for i in range(30)]
        assert len(heard.lists) == 1, "a page is not a fleet"


async def test_h22_a_deletion_that_no_watch_told_shows_after_the_reconnect(api: KubeApi, tmp_path: Path) -> None:
    api.put(k.pod("a", "10.0.0.1"))
    b = api.put(k.pod("b", "10.0.0.2"))
    async with discovering(api, tmp_path) as (heard, _):
        await until(lambda: heard.names == ["a", "b"] and api.watching == 1, WORKING_S)
        api.delete(b, told=False)
        api.cut_watches()
        await until(lambda: heard.names == ["a"], SHORT_OUTAGE_S)


async def test_h22_the_periodic_list_finds_it_even_while_the_watch_works(api: KubeApi, tmp_path: Path) -> None:
    b = api.put(k.pod("b", "10.0.0.2"))
    async with discovering(api, tmp_path, pace=Pace(watch_life_s=1)) as (heard, discovery):
        await until(lambda: heard.names == ["b"] and api.watching == 1, WORKING_S)
        api.delete(b, told=False)
        await until(lambda: heard.names == [], 3.0)
        assert discovery.status().restarts == 0, "the normal end of a watch is no trouble"


async def test_h22_a_namesake_with_another_uid_seen_only_in_a_list_is_another_pod(api: KubeApi, tmp_path: Path) -> None:
    old = api.put(k.pod("vllm-0", "10.0.0.1", uid="first"))
    async with discovering(api, tmp_path) as (heard, _):
        await until(lambda: heard.names == ["vllm-0"] and api.watching == 1, WORKING_S)
        await api.stop()
        api.delete(old, told=False)
        api.put(k.pod("vllm-0", "10.0.0.1", uid="second"))
        api.compact()
        await api.start()
        await until(lambda: [p.identity for p in heard.lists[-1]] == ["second"], SHORT_OUTAGE_S)


async def test_h23_a_terminating_pod_is_told_at_once_and_stays_listed(api: KubeApi, tmp_path: Path) -> None:
    api.put(k.pod("a"))
    async with discovering(api, tmp_path) as (heard, _):
        await until(lambda: heard.names == ["a"] and api.watching == 1, WORKING_S)
        api.put(k.pod("a", deleting=True, ready=True))
        await until(lambda: heard.names == [], WORKING_S)
        assert [(p.name, p.terminating) for p in heard.lists[-1]] == [("a", True)], "its streams go on"


async def test_h24_running_is_not_ready(api: KubeApi, tmp_path: Path) -> None:
    api.put(k.pod("a", ready=False))
    async with discovering(api, tmp_path) as (heard, _):
        await until(lambda: bool(heard.lists), WORKING_S)
        assert heard.names == []
        api.put(k.pod("a"))
        await until(lambda: heard.names == ["a"], WORKING_S)


async def test_h25_a_stumbling_listener_does_not_stop_the_watch(
    api: KubeApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(k.pod("a"))
    async with discovering(api, tmp_path) as (heard, discovery):
        await until(lambda: heard.names == ["a"] and api.watching == 1, WORKING_S)
        heard.fail = True
        api.put(k.pod("b", "10.0.0.2"))
        await until(lambda: "could not take the list" in caplog.text, WORKING_S)
        heard.fail = False
        api.put(k.pod("c", "10.0.0.3"))
        await until(lambda: heard.names == ["a", "b", "c"], WORKING_S)
        assert discovery.status().restarts == 0


async def test_h25_one_strange_object_costs_only_itself(api: KubeApi, tmp_path: Path) -> None:
    strange = k.pod("strange")
    strange["status"]["containerStatuses"] = "none of your business"
    api.put(strange)
    api.put(k.pod("a"))
    async with discovering(api, tmp_path) as (heard, discovery):
        await until(lambda: heard.names == ["a"] and api.watching == 1, WORKING_S)
        api.put({**strange, "metadata": {**strange["metadata"], "name": "stranger"}})
        api.put(k.pod("b", "10.0.0.2"))
        await until(lambda: heard.names == ["a", "b"], WORKING_S)
        assert discovery.status().restarts == 0


@pytest.mark.parametrize("blind", [False, True], ids=["told as DELETED", "told as MODIFIED"])
async def test_h26_a_pod_that_lost_its_label_is_gone(api: KubeApi, tmp_path: Path, blind: bool) -> None:
    api.blind_watch = blind
    api.put(k.pod("a"))
    async with discovering(api, tmp_path) as (heard, _):
        await until(lambda: heard.names == ["a"] and api.watching == 1, WORKING_S)
        api.put(k.pod("a", labels={"app": "debugging"}))
        await until(lambda: heard.lists[-1] == (), WORKING_S)
        api.put(k.pod("a"))
        await until(lambda: heard.names == ["a"], WORKING_S)


async def test_h26_same_name_with_new_uid_and_address_replaces_the_old(api: KubeApi, tmp_path: Path) -> None:
    api.put(k.pod("vllm-0", "10.0.0.1", uid="first"))
    async with discovering(api, tmp_path) as (heard, _):
        await until(lambda: heard.names == ["vllm-0"] and api.watching == 1, WORKING_S)
        api.put(k.pod("vllm-0", "10.0.0.2", uid="second"))
        await until(
            lambda: [(p.identity, p.url) for p in heard.lists[-1]] == [("second", "http://10.0.0.2:8000")], WORKING_S
        )


async def test_h26_a_late_deletion_of_the_old_one_does_not_take_the_new_one_out(api: KubeApi, tmp_path: Path) -> None:
    old = api.put(k.pod("vllm-0", "10.0.0.1", uid="first"))
    async with discovering(api, tmp_path) as (heard, _):
        await until(lambda: heard.names == ["vllm-0"] and api.watching == 1, WORKING_S)
        api.put(k.pod("vllm-0", "10.0.0.2", uid="second"))
        api.say_in_watches({"type": "DELETED", "object": old})
        api.put(k.pod("z", "10.0.0.3"))
        await until(lambda: heard.names == ["vllm-0", "z"], WORKING_S)


async def test_h26_a_container_restart_is_a_new_incarnation_of_the_same_pod(api: KubeApi, tmp_path: Path) -> None:
    api.put(k.pod("a", uid="u"))
    async with discovering(api, tmp_path) as (heard, _):
        await until(lambda: heard.names == ["a"] and api.watching == 1, WORKING_S)
        before = heard.lists[-1][0].incarnation
        api.put(k.pod("a", uid="u", restarts=1, started_at="2026-01-01T00:05:00Z"))
        await until(lambda: heard.lists[-1][0].incarnation != before, WORKING_S)
        assert heard.lists[-1][0].identity == "u"


async def test_h27_a_silent_watch_is_left_for_a_new_list(api: KubeApi, tmp_path: Path) -> None:
    api.put(k.pod("a"))
    async with discovering(api, tmp_path, pace=Pace(watch_life_s=1, watch_grace_s=0.5)) as (heard, _):
        await until(lambda: heard.names == ["a"] and api.watching == 1, WORKING_S)
        api.silent = True
        api.put(k.pod("b", "10.0.0.2"))
        await until(lambda: heard.names == ["a", "b"], 1.5)
        await until(lambda: "timeout" in heard.restarts, 1.5)


def test_h27_the_default_pace_keeps_what_is_promised() -> None:
    pace, chance = Pace(), random.Random(1)
    silent_watch_s = max(pace.life_s(chance) for _ in range(1000)) + pace.watch_grace_s
    longest_retry_s = max(pace.retry_s(n, chance) for n in range(1, 2000))
    from router.fleet.k8s_api import CONNECT_LIMIT_S, IDLE_LIMIT_S

    assert silent_watch_s + longest_retry_s <= 75, "rotation and silence: the next request is at most that far"
    assert longest_retry_s <= SHORT_OUTAGE_S
    assert longest_retry_s + max(CONNECT_LIMIT_S, IDLE_LIMIT_S) <= 45
    assert [pace.retry_s(0, chance), pace.life_s(chance) > 30] == [0.0, True]


@pytest.mark.parametrize("in_stream", [True, False], ids=["ERROR event", "HTTP status"])
async def test_h28_410_means_a_new_list_and_never_an_empty_fleet(api: KubeApi, tmp_path: Path, in_stream: bool) -> None:
    api.gone_in_stream = in_stream
    api.put(k.pod("a"))

    async def compacted_meanwhile(request: web.Request) -> web.Response:
        reply = api._list("pods", "serving", dict(request.query))
        api.put(k.pod("b", "10.0.0.2"))
        api.compact()
        return reply

    api.next_replies.append(compacted_meanwhile)
    async with discovering(api, tmp_path) as (heard, _):
        await until(lambda: heard.names == ["a", "b"], SHORT_OUTAGE_S)
        assert heard.restarts[0] == "gone"
        assert () not in heard.lists


async def test_h28_410_in_the_middle_of_a_watch(api: KubeApi, tmp_path: Path) -> None:
    a = api.put(k.pod("a"))
    async with discovering(api, tmp_path) as (heard, discovery):
        await until(lambda: heard.names == ["a"] and api.watching == 1, WORKING_S)
        api.delete(a, told=False)
        api.put(k.pod("b", "10.0.0.2"))
        status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        api.say_in_watches({"type": "ERROR", "object": status})
        await until(lambda: heard.names == ["b"], SHORT_OUTAGE_S)
        await until(lambda: api.watching == 1, WORKING_S)
        assert discovery.status().last_error is None, "over and done"
        api.put(k.pod("c", "10.0.0.3"))
        await until(lambda: heard.names == ["b", "c"], WORKING_S)


async def test_h28_410_again_and_again_backs_off(api: KubeApi, tmp_path: Path) -> None:
    api.put(k.pod("a"))

    async def expired(request: web.Request) -> web.Response:
        return k._status(410, "Expired", "too old resource version")

    async def listed(request: web.Request) -> web.Response:
        return api._list("pods", "serving", dict(request.query))

    for _ in range(50):
        api.next_replies += [listed, expired]
    async with discovering(api, tmp_path) as (heard, _):
        await until(lambda: len(heard.restarts) >= 3, 5.0)
        assert api.asked(watch=False) < 10, "a list for each turn of the loop, and a wait between them"
        assert heard.lists == [heard.lists[0]]


async def test_h28_a_list_without_resource_version(api: KubeApi, tmp_path: Path) -> None:
    api.next_replies.append(k.no_version)
    api.put(k.pod("a"))
    async with discovering(api, tmp_path) as (heard, _):
        await until(lambda: heard.names == ["a"], WORKING_S)
        watch = next(query for _, query, _ in api.requests if "watch" in query)
        assert "resourceVersion" not in watch


async def test_h29_a_rotated_token_is_read_again(api: KubeApi, tmp_path: Path) -> None:
    api.valid_tokens = {"first"}
    api.put(k.pod("a"))
    async with discovering(api, tmp_path) as (heard, discovery):
        await until(lambda: heard.names == ["a"] and api.watching == 1, WORKING_S)
        api.valid_tokens = {"second"}
        api.cut_watches()
        await until(lambda: "unauthorized" in heard.restarts, SHORT_OUTAGE_S)
        error = discovery.status().last_error
        assert error is not None
        assert "401" in error
        assert heard.names == ["a"], "the last known fleet"
        (tmp_path / "token").write_text("second")
        api.put(k.pod("b", "10.0.0.2"))
        await until(lambda: heard.names == ["a", "b"], SHORT_OUTAGE_S)


async def test_h29_the_service_account_of_a_pod(tmp_path: Path) -> None:
    """As inside a cluster: token, namespace and CA from files, TLS, and a token file that is rewritten."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=stand-in",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "ca.crt"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("serving\n")
    api = KubeApi()
    await api.start(certificate=tmp_path / "ca.crt", key=tmp_path / "key.pem")
    try:
        api.valid_tokens = {"first"}
        api.put(k.pod("a"))
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(api.port)}
        async with discovering(api, tmp_path, environ=environ) as (heard, _):
            await until(lambda: heard.names == ["a"] and api.watching == 1, WORKING_S)
            (tmp_path / "token").write_text("second\n")
            api.valid_tokens = {"second"}
            api.put(k.pod("b", "10.0.0.2"))
            await until(lambda: heard.names == ["a", "b"], WORKING_S)
            api.cut_watches()
            api.put(k.pod("c", "10.0.0.3"))
            await until(lambda: heard.names == ["a", "b", "c"], SHORT_OUTAGE_S)
            assert "unauthorized" not in heard.restarts, "the new token was read before it was needed"
    finally:
        await api.stop()


async def test_h30_pods_from_none_and_to_none(api: KubeApi, tmp_path: Path) -> None:
    async with discovering(api, tmp_path) as (heard, _):
        await until(lambda: heard.names == [], WORKING_S)
        await until(lambda: api.watching == 1, WORKING_S)
        a = api.put(k.pod("a"))
        await until(lambda: heard.names == ["a"], WORKING_S)
        api.delete(a)
        await until(lambda: heard.names == [], WORKING_S)
        api.put(k.pod("a"))
        await until(lambda: heard.names == ["a"], WORKING_S)


async def test_the_last_known_fleet_is_kept_while_the_api_is_away(api: KubeApi, tmp_path: Path) -> None:
    a = api.put(k.pod("a"))
    async with discovering(api, tmp_path) as (heard, discovery):
        await until(lambda: heard.names == ["a"] and api.watching == 1, WORKING_S)
        await api.stop()
        await until(lambda: discovery.status().restarts >= 3, 5.0)
        assert heard.names == ["a"]
        error = discovery.status().last_error
        assert error is not None
        assert "connection to the API server failed" in error
        assert str(api.port) not in error, "no URL"
        api.delete(a, told=False)
        api.put(k.pod("b", "10.0.0.2"))
        await api.start()
        await until(lambda: heard.names == ["b"], SHORT_OUTAGE_S)
        assert len(heard.lists) == 2


async def test_an_api_server_that_starts_up_talks_nonsense_for_a_while(api: KubeApi, tmp_path: Path) -> None:
    api.put(k.pod("a"))
    api.next_replies += [k.unavailable, k.html, k.unavailable]
    async with discovering(api, tmp_path) as (heard, _):
        await until(lambda: heard.names == ["a"], SHORT_OUTAGE_S)
        assert heard.restarts == ["http", "decode", "http"]


async def test_a_missing_permission_says_what_is_missing(
    api: KubeApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api.forbidden = {"pods"}
    async with discovering(api, tmp_path) as (heard, discovery):
        await until(lambda: len(heard.restarts) >= 2, 5.0)
        status = discovery.status()
        assert not status.synced
        assert status.last_error is not None
        assert "needs get, list and watch on pods" in status.last_error
        assert caplog.text.count("needs get, list and watch on pods") == 1, "once, not at every try"
        assert heard.lists == []


async def test_without_any_credentials_it_says_what_was_looked_for(api: KubeApi, tmp_path: Path) -> None:
    async with discovering(api, tmp_path, environ={"HOME": str(tmp_path)}) as (_, discovery):
        await until(lambda: discovery.status().last_error is not None, WORKING_S)
        assert "KUBECONFIG is not set" in str(discovery.status().last_error)
    (tmp_path / "bad").write_text("users: [{name: x, user: {token: s3cret}}]\n\t- not yaml: [")
    async with discovering(api, tmp_path, environ={"KUBECONFIG": str(tmp_path / "bad")}) as (_, discovery):
        await until(lambda: discovery.status().last_error is not None, WORKING_S)
        assert "cannot be read" in str(discovery.status().last_error)
        assert "s3cret" not in str(discovery.status().last_error)


# ---- by Service ----


async def test_a_service_is_followed_through_its_endpoint_slices(api: KubeApi, tmp_path: Path) -> None:
    api.put(k.service())
    a, b = api.put(k.pod("a", "10.0.0.1")), api.put(k.pod("b", "10.0.0.2"))
    api.put(k.endpoint_slice("vllm-1", [k.endpoint(a), k.endpoint(b, ready=False)]))
    api.put(k.endpoint_slice("other-1", [k.endpoint(b)], service="other"))
    async with discovering(api, tmp_path, service="vllm") as (heard, discovery):
        await until(lambda: heard.names == ["a"] and api.watching == 2, WORKING_S)
        assert "2026" in heard.lists[-1][0].incarnation, "the pods are asked too, for what slices do not tell"
        assert len(heard.lists) == 1, "and waited for, or every pod would seem to restart"
        api.put(k.endpoint_slice("vllm-1", [k.endpoint(a), k.endpoint(b)]))
        await until(lambda: heard.names == ["a", "b"], WORKING_S)
        api.put(k.pod("a", "10.0.0.1", deleting=True))
        await until(lambda: heard.names == ["b"], WORKING_S)
        api.put(k.endpoint_slice("vllm-1", [k.endpoint(b)]))
        await until(lambda: [p.name for p in heard.lists[-1]] == ["b"], WORKING_S)
        api.delete(k.endpoint_slice("vllm-1", []))
        await until(lambda: heard.lists[-1] == (), WORKING_S)
        assert discovery.status().last_error is None


async def test_a_service_works_without_permission_to_read_pods(api: KubeApi, tmp_path: Path) -> None:
    api.forbidden = {"pods"}
    api.put(k.service())
    a = api.put(k.pod("a", "10.0.0.1"))
    api.put(k.endpoint_slice("vllm-1", [k.endpoint(a)]))
    async with discovering(api, tmp_path, service="vllm") as (heard, discovery):
        await until(lambda: heard.names == ["a"], WORKING_S)
        assert discovery.status().synced
        assert "pods of the service" in str(discovery.status().last_error)


async def test_a_service_without_pods_behind_it(api: KubeApi, tmp_path: Path) -> None:
    outside = {"addresses": ["192.0.2.5"], "conditions": {"ready": True}}
    api.put(k.endpoint_slice("vllm-1", [outside]))
    async with discovering(api, tmp_path, service="vllm") as (heard, _):
        await until(lambda: heard.names == ["http://192.0.2.5:8000"], WORKING_S)


@pytest.mark.parametrize("query", [{}, {"selector": "a=b", "service": "s"}, {"selector": "a in"}])
def test_a_question_that_cannot_be_asked_is_refused_at_once(query: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="--selector"):
        KubernetesDiscovery(lambda pods: None, **query)
