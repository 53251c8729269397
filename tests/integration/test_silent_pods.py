"""Pods that accept and never answer leave rotation after one probe; a slow /health alone does not take one out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from router.core.types import WorkerAddress
from router.fleet import silence
from router.fleet.fleet import Fleet, FleetTimes
from router.fleet.state import PodSpec
from tests.fakes.proxy_world import eventually, free_port

TIMES = FleetTimes(scrape_interval_s=0.1, scrape_timeout_s=0.5, probe_timeout_s=0.5)


class Mute:
    """A pod whose answers can be held back, by path."""

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.held: set[str] = set()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        while request.path in self.held or "*" in self.held:
            await asyncio.sleep(0.02)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        return web.Response(text="" if request.path == "/metrics" else "ok")


@contextlib.asynccontextmanager
async def fleet_of(count: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Fleet, list[Mute]]]:
    monkeypatch.setattr(silence, "SILENT_AFTER_S", 0.4)
    pods, runners = [Mute() for _ in range(count)], []
    for pod in pods:
        runner = web.ServerRunner(web.Server(pod.answer), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(pod.url.rsplit(":", 1)[1])).start()
        runners.append(runner)
    fleet = Fleet(times=TIMES)
    await fleet.start()
    try:
        fleet.set_pods([PodSpec(identity=p.url, name=p.url, url=p.url) for p in pods])
        await eventually(lambda: len(fleet.serving("m")) == count)
        yield fleet, pods
    finally:
        await fleet.close()
        for pod in pods:
            pod.held.clear()
        for runner in runners:
            await runner.cleanup()


async def test_a_pod_that_answers_nothing_leaves_after_one_probe_and_returns_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet_of(3, monkeypatch) as (fleet, pods):
        pods[0].held.add("*")
        await eventually(lambda: len(fleet.serving("m")) == 2)
        assert fleet._lives[pods[0].url].slow == 1
        assert {p.spec.url for p in fleet.serving("m")} == {pods[1].url, pods[2].url}
        pods[0].held.clear()
        await eventually(lambda: len(fleet.serving("m")) == 3)


async def test_a_pod_that_is_late_with_health_but_answers_requests_keeps_two_more_probes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet_of(2, monkeypatch) as (fleet, pods):
        pods[0].held |= {"/health", "/metrics"}
        life, deadline_s = fleet._lives[pods[0].url], time.monotonic() + 20.0
        while life.slow < 2:
            fleet.succeeded(WorkerAddress(pods[0].url))  # a reply's head has come
            assert len(fleet.serving("m")) == 2
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.02)
        await eventually(lambda: len(fleet.serving("m")) == 1)
        assert life.slow >= 2


async def test_when_all_are_silent_none_is_taken_out_at_the_first_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet_of(3, monkeypatch) as (fleet, pods):
        for pod in pods:
            pod.held.add("*")
        await eventually(lambda: all(life.slow >= 1 for life in fleet._lives.values()))
        assert len(fleet.serving("m")) == 3
