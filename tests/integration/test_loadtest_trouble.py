"""What stands or fails between client and pods is visible in the report: a real nginx, pods that fail now and then."""

from __future__ import annotations

import time
from pathlib import Path

import aiohttp
import msgspec
import pytest

from loadtest import report_html
from loadtest.crowd import Live
from loadtest.experiment import Client, Experiment
from loadtest.report import doubts, summaries
from loadtest.rig import rig
from loadtest.run import Arm, execute
from tests.fakes.nginx import needs_nginx, nginx
from tests.integration.test_fleet import PROFILE
from tests.integration.test_loadtest import GROUPS, QUICK, fleet, measure, plan_of

FAILING_SHARE = 0.05


@needs_nginx
@pytest.mark.parametrize(
    ("output_tokens", "text"),
    [
        pytest.param(10, "all at once at their end", id="an answer that fits nginx's buffer"),
        pytest.param(150, "tokens arrive in clumps", id="an answer of several buffers"),
    ],
)
async def test_nginx_with_its_default_buffering_before_a_pod_is_seen(
    output_tokens: int, text: str, tmp_path: Path
) -> None:
    slow = msgspec.structs.replace(PROFILE, num_blocks=400, t0_s=0.01)
    workload = [QUICK | {"rate": 10.0, "seconds": 1.0, "output_tokens": output_tokens}]
    experiment = msgspec.structs.replace(GROUPS, workload=workload)
    async with (
        fleet(1, profile=slow) as urls,
        nginx(int(urls[0].rpartition(":")[2]), tmp_path, http_version="1.0") as front,
    ):
        run = await measure(plan_of([Arm("direct", (urls[0],)), Arm("nginx", (front,))], experiment, pods=urls))
    assert [k.partition(":")[0] for k in doubts(run)[1] if text in k] == ["nginx"]


async def test_pods_that_fail_now_and_then_show_by_share_kind_and_pod() -> None:
    workload = [QUICK | {"rate": 50.0, "seconds": 6.0, "prefix_tokens": 60, "question_tokens": 10}]
    experiment = Experiment(name="failing", workload=workload, client=Client(api="completions"))
    faults = [{"kind": "reset", "after_tokens": 3}, {"kind": "500"}]
    async with rig(2, ["--profile", "laptop-toy"]) as built, aiohttp.ClientSession() as http:
        plan = plan_of([Arm("routed", (built.url,), "round-robin")], experiment, pods=built.pods)
        await measure(plan)  # tokens known, rates learnt: only the faults are new
        for pod, fault in zip(built.pods, faults, strict=True):
            await http.post(pod + "/emulated/fault", json=fault | {"share": FAILING_SHARE})
        run = await measure(plan)
        hits = [(await (await http.get(pod + "/emulated/state")).json())["fault_hits"] for pod in built.pods]
    (arm,) = summaries(run)
    cut, refused = built.pods
    assert arm.pooled.failures_by_pod == {cut: {"cut": hits[0]}, refused: {"http_500": hits[1]}}
    assert 0.5 * FAILING_SHARE < arm.pooled.failed / arm.pooled.requests < 2 * FAILING_SHARE
    assert not doubts(run)[0], "a few failures are told, they do not make the run invalid"
    page = report_html.render(run)
    for pod, kind, count in ((cut, "cut", hits[0]), (refused, "http_500", hits[1])):
        share = f"{count / arm.pooled.requests_by_pod[pod]:.1%}"
        assert f">{pod}</td><td class=name>{kind}</td><td>{count}</td><td>{share}</td>" in page


async def test_pods_that_the_machine_cannot_run_on_time_are_told() -> None:
    stalls: list[int] = []

    def stall(_arm: str, _stage: str, _number: int, _total: int, live: Live) -> None:
        if live.in_flight and not stalls:  # once: the pods have caught up when the stage ends
            stalls.append(live.in_flight)
            time.sleep(0.6)  # pods and client run on this very loop: nobody gets anything done

    slow = msgspec.structs.replace(PROFILE, num_blocks=400, t0_s=0.05)
    async with fleet(1, profile=slow) as urls:
        run = await execute(plan_of([Arm("one", (urls[0],))], pods=urls), stall)
    assert [k for k in doubts(run)[1] if "behind their own clock" in k]
