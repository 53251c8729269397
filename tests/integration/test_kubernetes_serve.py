"""A router process that finds emulated pods through the API stand-in, while clients keep asking.

The bounds are those promised for a working watch; the waits are generous, the counts are not.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from loadtest.fleet.faults import NO_FAULT, Fault
from loadtest.fleet.text import TINY_MODEL
from tests.fakes import kube_api as k
from tests.fakes.kube_api import KubeApi, kube_api
from tests.fakes.kube_world import Cluster, Crowd, Process, VllmPod, warmroute

ARGS = [
    "serve",
    "--host=127.0.0.1",
    "--port=0",
    "--admin-port=0",
    "--discovery=kubernetes",
    "--selector=app=vllm",
    f"--tokenizer=tiny={TINY_MODEL}",
]
PRE_STOP_S = 2.5  # the chart's is 5 s; what must hold is that the router has turned away before it ends


@asynccontextmanager
async def world(tmp_path: Path, pods: int) -> AsyncIterator[tuple[KubeApi, Cluster, Process]]:
    async with kube_api() as api:
        cluster = Cluster(api)
        try:
            for _ in range(pods):
                await cluster.add()
            config = str(api.kubeconfig(tmp_path))
            async with warmroute([*ARGS, "--namespace=serving"], tmp_path / "router.log", KUBECONFIG=config) as router:
                await router.listening("client", "admin")
                if pods:
                    await until_ready(router, pods)
                yield api, cluster, router
        finally:
            await cluster.stop()


async def until_ready(router: Process, pods: int, within_s: float = 30.0) -> None:
    """Polls /ready until it counts so many pods as ready."""
    seen: object = None
    try:
        async with asyncio.timeout(within_s), aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{router.url}/ready") as reply:
                    seen = await reply.json()
                if seen["pods_ready"] == pods:  # type: ignore[index]
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"{pods} ready pods were expected: {seen}\n{router.text}") from None


async def test_a_rollout_with_the_charts_settings_loses_nothing(tmp_path: Path) -> None:  # H23, H69
    async with world(tmp_path, 2) as (_, cluster, router), Crowd(router.url) as crowd:
        await crowd.more()
        old = list(cluster.pods)
        for pod in old:  # as a Deployment does: a new one first, then an old one goes
            await cluster.add()
            await until_ready(router, 3)
            await pod.terminate(pre_stop_s=PRE_STOP_S, drain_s=30.0)
            await until_ready(router, 2)
        before = sum(pod.requests for pod in old)
        await crowd.more()
        assert sum(pod.requests for pod in old) == before
        assert crowd.failed == crowd.broken == crowd.silent == []


async def test_a_rollout_with_vllms_defaults_cuts_nothing_silently(tmp_path: Path) -> None:
    async with world(tmp_path, 2) as (_, cluster, router), Crowd(router.url, answer_tokens=300) as crowd:
        await crowd.more(5)
        victim = cluster.pods[0]
        async with asyncio.timeout(30.0):
            while victim.streaming == 0:
                await asyncio.sleep(0.005)
        await victim.terminate_as_by_default()
        await until_ready(router, 1)
        async with asyncio.timeout(30.0):
            while not crowd.broken:
                await asyncio.sleep(0.05)
        await crowd.more(20, within_s=60.0)
        assert crowd.silent == []
        assert crowd.failed == [], "who had no byte yet was sent to the other pod"


async def test_an_evicted_pod_gets_nothing_two_seconds_later(tmp_path: Path) -> None:
    async with world(tmp_path, 2) as (_, cluster, router), Crowd(router.url) as crowd:
        await crowd.more()
        evicted = cluster.pods[0]
        evicted.evict()
        await asyncio.sleep(2.0)  # the bound itself
        before = evicted.requests
        await crowd.more()
        assert evicted.requests == before
        assert crowd.failed == crowd.silent == []


async def test_h30_to_zero_and_back(tmp_path: Path) -> None:
    async with world(tmp_path, 0) as (_, cluster, router), aiohttp.ClientSession() as session:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "anybody?"}], "max_tokens": 4}

        async def ask() -> tuple[int, str | None]:
            async with session.post(f"{router.url}/v1/chat/completions", json=body) as reply:
                await reply.read()
                return reply.status, reply.headers.get("Retry-After")

        async with session.get(f"{router.url}/ready?scope=self") as reply:
            assert reply.status == 200, "the chart's probe: an empty fleet is not the router's fault"
        status, retry_after = await asyncio.wait_for(ask(), 5.0)
        assert status == 503, "quickly, not held until somebody comes"
        assert retry_after is not None
        pod = await cluster.add()
        await until_ready(router, 1)
        assert (await ask())[0] == 200
        await pod.terminate(pre_stop_s=0.5, drain_s=10.0)
        await until_ready(router, 0)
        assert (await ask())[0] == 503
        await cluster.add()
        await until_ready(router, 1)
        assert (await ask())[0] == 200


async def test_h24_ready_for_kubernetes_but_not_healthy(tmp_path: Path) -> None:
    async with world(tmp_path, 1) as (_, cluster, router), Crowd(router.url) as crowd:
        await crowd.more()
        sick = VllmPod(cluster.api, "sick", cluster.text, cluster.labels)
        cluster.pods.append(sick)
        await sick.start(Fault(kind="503", health=True))
        await crowd.more()
        assert (await pods_of(router))["sick"]["reason"] == "health"
        assert sick.requests == 0
        sick.engine.pod.faults.set(NO_FAULT)
        await until_ready(router, 2)
        assert crowd.failed == crowd.broken == crowd.silent == []


async def test_h25_a_pod_that_talks_nonsense_stops_nothing(tmp_path: Path) -> None:
    """Its /v1/models answers 500, then HTML, then hangs; meanwhile others come and go as ever."""
    turn = 0

    async def models(_: web.Request) -> web.Response:
        nonlocal turn
        turn += 1
        if turn == 1:
            return web.json_response({"error": "boom"}, status=500)
        if turn == 2:
            return web.Response(text="<html>starting</html>", content_type="text/html")
        await asyncio.Event().wait()
        raise AssertionError

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.get("/health", health)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = str(runner.addresses[0][1])
        async with world(tmp_path, 1) as (api, cluster, router), Crowd(router.url) as crowd:
            api.put(k.pod("odd", "127.0.0.1", annotations={"warmroute.dev/port": port}))
            async with asyncio.timeout(30.0):
                while turn < 3:
                    await asyncio.sleep(0.05)
            await cluster.add()
            await until_ready(router, 2)
            await cluster.pods[0].terminate(pre_stop_s=PRE_STOP_S, drain_s=20.0)
            await until_ready(router, 1)
            await crowd.more()
            assert (await pods_of(router))["odd"]["ready"] is False
            assert crowd.failed == crowd.broken == crowd.silent == []
    finally:
        await runner.cleanup()


async def pods_of(router: Process) -> dict[str, Any]:
    """The rows of /debug/pods by name."""
    async with aiohttp.ClientSession() as session, session.get(f"{router.admin}/debug/pods") as reply:
        return {row["pod"]: row for row in (await reply.json())["pods"]}


@pytest.mark.parametrize("how", ["container restart", "namesake in a list"])
async def test_h26_a_new_life_begins_with_an_empty_cache(tmp_path: Path, how: str) -> None:
    """The engine's address and ports stay the same, so only Kubernetes tells at once that its cache is gone."""
    async with world(tmp_path, 1) as (api, cluster, router), aiohttp.ClientSession() as session:
        (pod,) = cluster.pods
        body = {"model": "tiny", "messages": [{"role": "user", "content": "remember this. " * 60}], "max_tokens": 2}

        async def matched() -> int:
            async with session.post(f"{router.admin}/debug/route", json=body) as reply:
                rows = (await reply.json())["workers"]
                return sum(row["matched_tokens"] or 0 for row in rows)

        async def until_matched(wanted: bool, within_s: float) -> None:
            async with asyncio.timeout(within_s):
                while (await matched() > 0) is not wanted or not await ready():
                    await asyncio.sleep(0.05)

        async def ready() -> bool:
            async with session.get(f"{router.url}/ready") as reply:
                return bool((await reply.json())["pods_ready"] == 1)

        async def chat() -> None:
            async with session.post(f"{router.url}/v1/chat/completions", json=body) as reply:
                assert reply.status == 200, await reply.text()
                await reply.read()

        async with asyncio.timeout(30.0):
            while await matched() == 0:  # the tokenizer may still be loading
                await chat()
        if how == "container restart":
            await pod.new_life(restarts=1)
        else:
            await api.stop()
            await pod.new_life(uid="another", told=False)
            await api.start()
        await until_matched(False, within_s=20.0)
        await chat()
        await until_matched(True, within_s=20.0)


async def test_the_api_server_goes_away_and_comes_back(tmp_path: Path) -> None:
    await api_away(tmp_path, away_s=3.0)


@pytest.mark.slow
async def test_the_api_server_is_away_for_a_minute(tmp_path: Path) -> None:
    await api_away(tmp_path, away_s=60.0)


async def api_away(tmp_path: Path, away_s: float) -> None:
    """The fleet is kept, its changes meanwhile are taken up afterwards, and no client notices."""
    async with world(tmp_path, 2) as (api, cluster, router), Crowd(router.url) as crowd:
        await crowd.more()
        await api.stop()
        await asyncio.sleep(away_s)
        await cluster.add()
        await crowd.more()
        await until_ready(router, 2)
        async with aiohttp.ClientSession() as session, session.get(f"{router.url}/ready") as reply:
            shown = (await reply.json())["discovery"]
            assert "connection to the API server failed" in shown["last_error"], "an operator is told"
        await api.start()
        await until_ready(router, 3)
        assert crowd.failed == crowd.broken == crowd.silent == []


@pytest.mark.slow
async def test_token_rotation_and_a_silent_watch_at_the_default_pace(tmp_path: Path) -> None:
    """H27 and H29 against the clock: 75 s and 6 minutes are promised."""
    async with world(tmp_path, 1) as (api, cluster, router), Crowd(router.url) as crowd:
        api.valid_tokens = {"second"}
        (tmp_path / "token").write_text("second")
        api.silent = True
        await cluster.add()
        await until_ready(router, 2, within_s=75.0)
        api.silent = False
        api.compact()
        api.cut_watches()
        await cluster.add()
        await until_ready(router, 3)
        await crowd.more()
        assert crowd.failed == crowd.broken == crowd.silent == []
