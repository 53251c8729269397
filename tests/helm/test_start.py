"""What the chart renders really starts: its command lines and environment, as processes on this machine.

Addresses and paths of a cluster are replaced, nothing else. The vLLM pods are emulated, the API server is a stand-in.
"""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from loadtest.fleet.text import TINY_MODEL
from tests.fakes.kube_api import KubeApi, kube_api
from tests.fakes.kube_world import Cluster, Crowd, Process, warmroute
from tests.fakes.redis_servers import binary, free_port
from tests.helm.conftest import Objects
from tests.helm.test_chart import container, named

SHARED = (
    "--set", "index.shared=true,router.decisionHeaders=true",
    "--set", "vllm.models[0].name=tiny,vllm.models[0].model=tiny,vllm.models[0].replicas=2",
    "--set", f"tokenizers.paths.tiny={TINY_MODEL}",
)  # fmt: skip
HERE = ["--host=127.0.0.1", "--port=0", "--admin-host=127.0.0.1", "--admin-port=0"]  # the last one of a flag counts


def environment(box: dict[str, Any], secrets: dict[str, str], **instead: str) -> dict[str, str]:
    """The container's environment as a kubelet makes it, `instead` for what is only in a cluster."""
    made: dict[str, str] = {}
    for variable in box.get("env", []):
        if "valueFrom" in variable:
            reference = variable["valueFrom"]["secretKeyRef"]
            made[variable["name"]] = secrets[f"{reference['name']}/{reference['key']}"]
        else:
            made[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda m: made[m[1]], variable["value"])
    return {**made, **instead}


def labels_of_vllm(objects: Objects) -> dict[str, str]:
    labels = named(objects, "Deployment", "rel-warmroute-vllm-tiny")["spec"]["template"]["metadata"]["labels"]
    return dict(labels)


@contextlib.contextmanager
def valkey(objects: Objects, password: str, folder: Path) -> Iterator[int]:
    """The bundled Valkey with the chart's own arguments."""
    args = [
        str(folder) if a == "/data" else a.replace("$(VALKEY_PASSWORD)", password)
        for a in container(objects, "Deployment", "rel-warmroute-valkey")["args"]
    ]
    port = free_port()
    process = subprocess.Popen(
        [binary("valkey"), *args, "--port", str(port), "--bind", "127.0.0.1"],
        stdout=subprocess.DEVNULL,
    )
    try:
        import redis

        until = time.monotonic() + 30
        with redis.Redis(port=port, password=password) as client:
            while True:
                with contextlib.suppress(redis.ConnectionError):
                    if client.ping():
                        break
                assert time.monotonic() < until, "Valkey did not start"
                time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait(10)


@asynccontextmanager
async def installed(
    objects: Objects, tmp_path: Path, pods: int
) -> AsyncIterator[tuple[KubeApi, Cluster, Process, Process]]:
    """`helm install`, as far as it goes without a cluster."""
    secrets = {
        "rel-warmroute-key-seed/seed": "seed-of-the-test",
        "rel-warmroute-valkey/password": "password-of-the-test",
    }
    router = container(objects, "Deployment", "rel-warmroute")
    indexer = container(objects, "Deployment", "rel-warmroute-indexer")
    async with kube_api() as api, contextlib.AsyncExitStack() as stack:
        port = stack.enter_context(valkey(objects, secrets["rel-warmroute-valkey/password"], tmp_path))
        cluster = Cluster(api, labels_of_vllm(objects))
        stack.push_async_callback(cluster.stop)
        for _ in range(pods):
            await cluster.add()
        cluster_only = {"KUBECONFIG": str(api.kubeconfig(tmp_path)), "HOME": str(tmp_path)}
        running = []
        for name, box in (("indexer", indexer), ("router", router)):
            env = environment(box, secrets, **cluster_only)
            env["WARMROUTE_REDIS_URL"] = env["WARMROUTE_REDIS_URL"].replace(
                "rel-warmroute-valkey:6379", f"127.0.0.1:{port}"
            )
            assert env["WARMROUTE_REDIS_URL"] == f"redis://:password-of-the-test@127.0.0.1:{port}/0"
            here = HERE if name == "router" else HERE[2:]
            process = await stack.enter_async_context(warmroute([*box["args"], *here], tmp_path / f"{name}.log", **env))
            running.append(process)
        await running[0].listening("admin")
        await running[1].listening("client", "admin")
        yield api, cluster, running[1], running[0]


async def json_of(url: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        return reply.status, await reply.json()


async def until(what: Callable[[], Any], within_s: float = 40.0) -> None:
    async with asyncio.timeout(within_s):
        while not await what():
            await asyncio.sleep(0.1)


async def test_a_chat_finds_its_history_again(render: Callable[..., Objects], tmp_path: Path) -> None:
    """Router, indexer, Valkey and two pods with the chart's own words; the second turn is predicted from the index."""
    objects = render(*SHARED)
    async with installed(objects, tmp_path, pods=2) as (_, cluster, router, indexer):
        for process, port, probe in (
            (router, "client", container(objects, "Deployment", "rel-warmroute")["readinessProbe"]),
            (indexer, "admin", container(objects, "Deployment", "rel-warmroute-indexer")["readinessProbe"]),
        ):
            base = f"http://127.0.0.1:{process.ports[port]}"
            status, _ = await json_of(base + probe["httpGet"]["path"])
            assert status == 200

        async def both_pods() -> bool:
            return (await json_of(router.url + "/ready"))[1]["pods_ready"] == 2

        await until(both_pods)
        text = "Everything that was said before is said again, word by word. " * 20
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
        async with aiohttp.ClientSession() as session:

            async def known() -> bool:
                """The pod that computed it gets it again, and the index alone had predicted what it delivers."""
                async with session.post(router.url + "/v1/chat/completions", json=body) as reply:
                    assert reply.status == 200, await reply.text()
                    usage = (await reply.json())["usage"]
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                    asked.append(reply.headers["x-warmroute-pod"])
                    return int(reply.headers.get("x-warmroute-indexed-tokens", "0")) == cached > 0

            asked: list[str] = []
            await until(known)
            assert asked[-1] in asked[:-1]
            assert asked[-1] in {pod.name for pod in cluster.pods}
        for name, process in (("rel-warmroute", router), ("rel-warmroute-indexer", indexer)):
            limit = container(objects, "Deployment", name)["resources"]["limits"]["memory"]
            used = await resident_bytes(process.admin)
            sys.stdout.write(f"{name}: {used / 2**20:.0f} MiB resident\n")
            assert used < int(limit.removesuffix("Gi")) * 2**30 / 2
        assert await router.stop() == 0
        assert await indexer.stop() == 0


async def test_a_rollout_with_the_charts_own_times(render: Callable[..., Objects], tmp_path: Path) -> None:
    """preStop and shutdown timeout as rendered; a client that keeps asking notices nothing. H69"""
    objects = render(*SHARED)
    deployment = named(objects, "Deployment", "rel-warmroute-vllm-tiny")
    box = container(objects, "Deployment", "rel-warmroute-vllm-tiny")
    pre_stop_s = float(box["lifecycle"]["preStop"]["exec"]["command"][1])
    drain_s = float(next(a.split("=")[1] for a in box["args"] if a.startswith("--shutdown-timeout=")))
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    async with installed(objects, tmp_path, pods=2) as (_, cluster, router, _), Crowd(router.url) as crowd:
        await crowd.more()
        old = cluster.pods[0]
        await old.terminate(pre_stop_s=pre_stop_s, drain_s=drain_s)
        await cluster.add()
        await crowd.more()
        assert crowd.failed == crowd.broken == crowd.silent == []


async def test_nothing_that_is_logged_holds_a_secret(render: Callable[..., Objects], tmp_path: Path) -> None:
    objects = render(*SHARED, "--set", "router.logLevel=debug,indexer.logLevel=debug")
    async with installed(objects, tmp_path, pods=1) as (api, _, router, indexer):
        api.cut_watches()
        await asyncio.sleep(0.5)
        for process in (router, indexer):
            status, page = await json_of(f"{process.admin}/debug/pods")
            assert status == 200
            for secret in ("password-of-the-test", "seed-of-the-test"):
                assert secret not in process.text
                assert secret not in json.dumps(page)


@pytest.mark.parametrize("name", ["rel-warmroute-smoke"])
async def test_the_smoke_test_of_helm_test(render: Callable[..., Objects], tmp_path: Path, name: str) -> None:
    """The pod's own script, against a router without any vLLM pod, which is what an empty cluster has. H71"""
    objects = render()
    (box,) = named(objects, "Pod", name)["spec"]["containers"]
    args = container(objects, "Deployment", "rel-warmroute")["args"]
    async with kube_api() as api:
        env = {"KUBECONFIG": str(api.kubeconfig(tmp_path)), "HOME": str(tmp_path)}
        async with warmroute([*args, *HERE], tmp_path / "router.log", **env) as router:
            await router.listening("client")
            script = box["args"][0].replace("http://rel-warmroute:80", router.url)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *box["command"][1:],
                script,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output, _ = await asyncio.wait_for(process.communicate(), 60.0)
            assert process.returncode == 0, output.decode()
            assert b"no vLLM pod can serve yet" in output
            limit = container(objects, "Deployment", "rel-warmroute")["resources"]["limits"]["memory"]
            assert await resident_bytes(router.url) < int(limit.removesuffix("Gi")) * 2**30 / 2
            assert await router.stop() == 0


async def resident_bytes(url: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as reply:
        (value,) = re.findall(r"^warmroute_process_resident_memory_bytes (\S+)$", await reply.text(), re.MULTILINE)
    return float(value)
