"""The stand-in API server is kept honest by a client that is not ours: the real kubectl."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes import kube_api as k
from tests.fakes.kube_api import KubeApi, kube_api
from tests.helm.conftest import fetched


@pytest.fixture
async def api() -> AsyncIterator[KubeApi]:
    async with kube_api() as running:
        a = running.put(k.pod("a", "10.0.0.1"))
        running.put(k.pod("b", "10.0.0.2", ready=False))
        running.put(k.pod("other", "10.0.0.3", labels={"app": "other"}))
        running.put(k.endpoint_slice("vllm-1", [k.endpoint(a)]))
        running.put(k.service())
        yield running


async def kubectl(api: KubeApi, home: Path, *arguments: str) -> str:
    """Its output. Fails with its words if it fails."""
    process = await start(api, home, *arguments)
    output, errors = await asyncio.wait_for(process.communicate(), 60.0)
    assert process.returncode == 0, errors.decode()
    return output.decode()


async def start(api: KubeApi, home: Path, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        fetched("v4", "kubectl"),
        f"--kubeconfig={api.kubeconfig(home)}",
        f"--cache-dir={home}",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("get", "pods"), {"pod/a", "pod/b", "pod/other"}),
        (("get", "pods", "-l", "app=vllm"), {"pod/a", "pod/b"}),
        (("get", "pods", "-l", "app=vllm", "--chunk-size=1"), {"pod/a", "pod/b"}),
        (("get", "pods", "-l", "app!=vllm"), {"pod/other"}),
        (
            ("get", "endpointslices", "-l", "kubernetes.io/service-name=vllm"),
            {"endpointslice.discovery.k8s.io/vllm-1"},
        ),
        (("get", "services"), {"service/vllm"}),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
async def test_get(api: KubeApi, tmp_path: Path, arguments: tuple[str, ...], names: set[str]) -> None:
    assert set((await kubectl(api, tmp_path, *arguments, "-o", "name")).split()) == names


async def test_an_object_comes_back_as_it_was_put(api: KubeApi, tmp_path: Path) -> None:
    found = json.loads(await kubectl(api, tmp_path, "get", "pod", "a", "-o", "json"))
    assert found == api.store["pods"]["serving", "a"]


async def test_watch(api: KubeApi, tmp_path: Path) -> None:
    """Added, changed and deleted pods as kubectl tells them, and what leaves the selector as DELETED."""
    process = await start(
        api, tmp_path, "get", "pods", "-l", "app=vllm", "--watch", "--output-watch-events", "-o", "json"
    )
    text = ""

    async def told() -> tuple[str, str]:
        nonlocal text
        assert process.stdout is not None
        while True:
            try:
                event, end = json.JSONDecoder().raw_decode(text)
                text = text[end:].lstrip()
                return event["type"], event["object"]["metadata"]["name"]
            except json.JSONDecodeError:
                piece = await asyncio.wait_for(process.stdout.read(65536), 30.0)
                assert piece, "kubectl ended"
                text += piece.decode().lstrip() if not text else piece.decode()

    try:
        assert {await told(), await told()} == {("ADDED", "a"), ("ADDED", "b")}
        api.put(k.pod("c", "10.0.0.4"))
        assert await told() == ("ADDED", "c")
        api.put(k.pod("b", "10.0.0.2"))
        assert await told() == ("MODIFIED", "b")
        api.put(k.pod("b", "10.0.0.2", labels={"app": "debugging"}))
        assert await told() == ("DELETED", "b")
    finally:
        process.kill()
        await process.wait()
