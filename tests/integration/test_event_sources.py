"""A pod says where its events are: late, or elsewhere after a restart, and is followed all the same."""

from __future__ import annotations

import asyncio

from aiohttp import web

from router.fleet.fleet import Fleet, FleetTimes
from router.fleet.state import EventSource, PodSpec
from tests.fakes.proxy_world import eventually, free_port


class Pod:
    """What a vLLM pod tells of itself."""

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.started_s, self.port, self.model = 1.0, 41001, "m"
        self.source_status = 200
        self.busy = True  # GET /kv_event_sources is not answered

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": self.model}]})
        if request.path == "/metrics":
            return web.Response(text=f"process_start_time_seconds {self.started_s}\n")
        if request.path == "/kv_event_sources":
            while self.busy:
                await asyncio.sleep(0.02)
            return web.json_response({"0": {"endpoint": f"tcp://*:{self.port}"}}, status=self.source_status)
        return web.Response(text="ok")


async def test_events_are_found_after_a_slow_answer_and_after_a_restart() -> None:
    pod = Pod()
    runner = web.ServerRunner(web.Server(pod.answer), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(pod.url.rsplit(":", 1)[1])).start()
    fleet = Fleet(times=FleetTimes(scrape_interval_s=0.1, probe_timeout_s=0.5))
    await fleet.start()
    fleet.set_pods([PodSpec(identity=pod.url, name="pod", url=pod.url)])

    def at(port: int) -> bool:
        return fleet.state.pods[pod.url].source == EventSource(((f"tcp://127.0.0.1:{port}", None),))

    try:
        await eventually(lambda: fleet.serving("m"), what="no events are no reason not to serve")
        pod.busy, pod.source_status = False, 500
        await asyncio.sleep(0.1)
        pod.source_status = 200
        await eventually(lambda: at(41001), within_s=30, what="asked again")
        pod.port, pod.model, pod.started_s = 41777, "other", 2.0
        await eventually(lambda: at(41777), within_s=5, what="asked the new process")
        assert fleet.serving("other")
        assert not fleet.serving("m")
    finally:
        await fleet.close()
        await runner.cleanup()
