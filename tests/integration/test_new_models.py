"""An adapter that was loaded a moment ago is served at once, and unknown names cost the pods little."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec

from loadtest.fleet import PodConfig, RunningPod, running_fleet
from loadtest.profile import load_profile
from router.core.types import WorkerAddress
from router.fleet.fleet import PROBE_INTERVAL_S, Fleet
from router.fleet.state import PodSpec
from tests.fakes.proxy_world import eventually


@contextlib.asynccontextmanager
async def fleet_of(count: int) -> AsyncIterator[tuple[Fleet, list[RunningPod]]]:
    config = PodConfig(profile=load_profile("laptop-toy"), model="base")
    async with running_fleet([config] * count) as pods:
        fleet = Fleet()
        await fleet.start()
        try:
            fleet.set_pods([PodSpec(identity=p.url, name=p.url, url=p.url) for p in pods])
            await eventually(lambda: len(fleet.serving("base")) == count)
            yield fleet, pods
        finally:
            await fleet.close()


async def test_an_adapter_loaded_on_one_pod_is_served_there_by_the_next_request() -> None:
    async with fleet_of(2) as (fleet, pods):
        pods[1].pod.config = msgspec.structs.replace(pods[1].pod.config, loras=("new",))
        assert not fleet.serves("new")
        assert not fleet.serves("")  # a name that nobody has, not the absence of one
        assert await fleet.serves_by_now("new")
        assert [p.spec.url for p in fleet.serving("new")] == [pods[1].url]


async def test_an_adapter_unloaded_on_one_pod_is_asked_of_the_other_one_probe_later() -> None:
    async with fleet_of(2) as (fleet, pods):
        for pod in pods:
            pod.pod.config = msgspec.structs.replace(pod.pod.config, loras=("both",))
        assert await fleet.serves_by_now("both")
        assert len(fleet.serving("both")) == 2
        pods[0].pod.config = msgspec.structs.replace(pods[0].pod.config, loras=())
        fleet.doubted(WorkerAddress(pods[0].url))  # its answer to a request was 404
        await eventually(lambda: len(fleet.serving("both")) == 1, within_s=PROBE_INTERVAL_S + 1.5)
        assert fleet.serving("both")[0].spec.url == pods[1].url


async def test_a_pod_that_went_meanwhile_is_not_brought_back_by_it() -> None:
    async with fleet_of(2) as (fleet, pods):
        await pods[0].stop()
        assert not await fleet.serves_by_now("new")
        assert "base" in {m.id for m in fleet.pods()[0].models}
        assert fleet.serving("base")
