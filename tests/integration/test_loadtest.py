"""The crowd over real sockets against emulated pods: arms, sessions, processes, and paths that hide something."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from loadtest import report_html
from loadtest.__main__ import main
from loadtest.compare import base_url
from loadtest.crowd import Crowd, Target
from loadtest.crowds import Recipe
from loadtest.experiment import Client, Experiment
from loadtest.fleet import TINY_MODEL, PodConfig, running_fleet
from loadtest.patience import patiently
from loadtest.prompts import Prompts, plain_words
from loadtest.report import doubts, summaries
from loadtest.run import Arm, NotYet, Plan, PlanError, check_arms, execute, first_model
from loadtest.samples import Run
from loadtest.workload import bursts
from tests.integration.test_fleet import PROFILE
from tests.unit.loadtest.test_report import run_of

QUICK = {"kind": "shared-prefix", "groups": 3, "prefix_tokens": 200, "question_tokens": 20, "output_tokens": 10}
GROUPS = Experiment(name="groups", workload=[QUICK | {"rate": 25.0, "seconds": 1.0}], client=Client(api="completions"))
CHATS = Experiment(
    name="chats",
    workload=[
        {"kind": "chat", "rate": 8.0, "seconds": 1.0, "systems": 2, "system_tokens": 100, "turns_mean": 3.0}
        | {"first_tokens": 20, "next_tokens": 20, "output_tokens": 20, "think_s": 0.01}
    ],
    client=Client(concurrency=4),
)


def plan_of(arms: list[Arm], experiment: Experiment = GROUPS, processes: int = 1, **changes: object) -> Plan:
    recipe = Recipe(experiment=experiment, seed=3, speed=1.0, tokenizer=TINY_MODEL, client_processes=processes)
    # no test here is about speed, and the machine may be busy with anything
    return msgspec.structs.replace(Plan(arms=arms, recipe=recipe, model="tiny", late_limit_s=1e9), **changes)


@contextlib.asynccontextmanager
async def fleet(pods: int = 2, **changes: object) -> AsyncIterator[list[str]]:
    config = PodConfig(profile=msgspec.structs.replace(PROFILE, num_blocks=400))
    async with running_fleet([msgspec.structs.replace(config, **changes)] * pods) as running:
        yield [p.url for p in running]


def quiet(*_: object) -> None:
    """Nobody watches."""


async def measure(plan: Plan) -> Run:
    return await asyncio.wait_for(execute(plan, quiet), 100)


async def test_arms_run_on_the_same_pods_with_empty_caches_and_the_same_requests() -> None:
    async with fleet() as urls:
        arms = [Arm("one", (urls[0],)), Arm("both", tuple(urls))]
        run = await measure(plan_of(arms, pods=urls, repeats=2))
    assert [(r.arm, r.repeat) for r in run.runs] == [("one", 0), ("both", 0), ("both", 1), ("one", 1)]
    assert all(r.cache_reset for r in run.runs)
    assert run.emulated is not None
    assert "median of repeats" in report_html.render(run)
    one, both = summaries(run)
    assert one.pooled.failed == both.pooled.failed == 0
    assert one.pooled.requests == both.pooled.requests > 10
    assert list(one.pooled.requests_by_pod.values()) == [one.pooled.requests, 0]
    assert abs(both.pooled.requests_by_pod[urls[0]] - both.pooled.requests_by_pod[urls[1]]) <= 2
    for arm in (one, both):
        assert arm.pooled.prompt_tokens_mean == 220, "exact lengths, by the pod's own count"
        assert arm.pooled.output_tokens_mean == 10
        assert arm.pooled.hit_share_usage == pytest.approx(arm.pooled.hit_share_pods)
    # three prefixes on one pod are missed three times a repeat, on two pods six times
    assert one.pooled.hit_share_pods > both.pooled.hit_share_pods > 0
    invalid, know = doubts(run)
    assert not invalid
    assert not [k for k in know if "buffers" in k or "failed" in k]


async def test_pods_that_allow_no_reset_get_fresh_prompts_for_every_arm() -> None:
    async with fleet(1) as urls:
        run = await measure(plan_of([Arm("a", (urls[0],)), Arm("b", (urls[0],))]))
    a, b = summaries(run)
    assert not any(r.cache_reset for r in run.runs)
    assert a.pooled.hit_share_usage == pytest.approx(b.pooled.hit_share_usage), "b found nothing that a had left"
    assert any("prompts of its own" in k for k in doubts(run)[1])


async def test_the_next_turn_of_a_chat_finds_the_answer_before_it_in_the_cache() -> None:
    async with fleet(1) as urls:
        run = await measure(plan_of([Arm("one", (urls[0],))], CHATS, pods=urls))
    (arm,) = summaries(run)
    assert arm.pooled.failed == 0
    turns = [s for stage in run.runs[0].stages for s in stage.samples]
    assert len(turns) == sum(len(s.turns) for s in CHATS.build(3).stages[0].sessions)
    later = [s for s in turns if s.cached_tokens and s.cached_tokens > 112]  # more than the system prompt
    assert later, "no turn found its history"


async def test_several_client_processes_send_every_request_once() -> None:
    async with fleet() as urls:
        run = await measure(plan_of([Arm("both", tuple(urls))], processes=2, pods=urls))
    (arm,) = summaries(run)
    expected = GROUPS.build(3).stages[0].sessions
    assert arm.pooled.requests == len(expected)
    assert sum(arm.pooled.requests_by_pod.values()) == len(expected)
    assert arm.pooled.failed == 0


async def test_failing_pods_show_as_failures_by_kind() -> None:
    async with fleet(1) as urls, aiohttp.ClientSession() as http:
        await http.post(urls[0] + "/emulated/fault", json={"kind": "500", "count": 2})
        with pytest.raises(PlanError, match="answers 500"):
            await measure(plan_of([Arm("one", (urls[0],))]))
        await http.post(
            urls[0] + "/emulated/fault", json={"kind": "reset", "after_tokens": 3, "count": 3}
        )  # one for the first look
        run = await measure(plan_of([Arm("one", (urls[0],))]))
    (arm,) = summaries(run)
    assert arm.pooled.failures == {"cut": 2}
    assert any("2 of" in k and "cut 2" in k for k in doubts(run)[1])


async def test_a_buffering_proxy_in_the_path_is_seen() -> None:
    slow = msgspec.structs.replace(PROFILE, num_blocks=400, t0_s=0.01)
    async with fleet(1, profile=slow) as urls, buffering_proxy(urls[0]) as proxy:
        run = await measure(plan_of([Arm("direct", (urls[0],)), Arm("proxied", (proxy,))], pods=urls))
    direct, proxied = summaries(run)
    assert proxied.pooled.buffered_share == 1.0
    assert proxied.pooled.events_per_read == 10
    assert direct.pooled.buffered_share is not None
    assert direct.pooled.buffered_share < 0.5
    assert any(k.startswith("proxied: 100% of the answers came all at once") for k in doubts(run)[1])


@contextlib.asynccontextmanager
async def buffering_proxy(pod: str) -> AsyncIterator[str]:
    """What nginx does without X-Accel-Buffering: no: the whole answer first, then the client."""

    async def handle(request: web.Request) -> web.Response:
        async with aiohttp.ClientSession() as http, http.post(pod + request.path, data=await request.read()) as reply:
            return web.Response(body=await reply.read(), status=reply.status, content_type=reply.content_type)

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class SlowPrompts(Prompts):
    """A client whose processor is too slow for the load: every body takes longer than the time between two requests."""

    def body(self, *args: object, **kwargs: object) -> bytes:
        time.sleep(0.08)
        return super().body(*args, **kwargs)


async def test_a_client_that_cannot_keep_up_makes_the_run_invalid() -> None:
    async with fleet(1) as urls:
        prompts = SlowPrompts(plain_words(TINY_MODEL))
        async with Crowd(Target(urls=(urls[0],), model="tiny", api="completions"), prompts) as crowd:
            stage = GROUPS.build(3).stages[0]
            outcome = await crowd.run(stage, stage.sessions)
    assert len(outcome.samples) == len(stage.sessions), "late, but sent"
    run = run_of(("slow", [outcome]))
    assert any("the client was the limit" in text for text in doubts(run)[0])


async def test_what_is_due_at_once_was_built_before() -> None:
    built: list[int] = []
    at_each_send: list[int] = []

    class Counted(Prompts):
        def body(self, *args: object, **kwargs: object) -> bytes:
            built.append(len(built))
            return super().body(*args, **kwargs)

    class Deaf(Crowd):
        async def _session(self, *_: object) -> None:
            at_each_send.append(len(built))

    stage = bursts(1, siblings=20, every_s=1, seconds=2, prefix_tokens=50, question_tokens=5, output_tokens=1).stages[0]
    async with Deaf(Target(urls=("http://127.0.0.1:9",), model="tiny"), Counted(plain_words(None))) as crowd:
        await crowd.run(stage, stage.sessions)
    assert at_each_send[20:] == [40] * 20


@contextlib.asynccontextmanager
async def endpoint(status: int, *, only: str | None = None, **headers: str) -> AsyncIterator[str]:
    """Answers everything so, or `only` one path and 404 to the rest."""

    async def handle(request: web.Request) -> web.Response:
        if only is not None and request.path != only:
            return web.json_response({}, status=404)
        return web.json_response({"error": {}}, status=status, headers=headers)

    async with serving(handle) as url:
        yield url


@contextlib.asynccontextmanager
async def serving(handle: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_router_that_ignores_the_policy_header_is_refused_before_the_load() -> None:
    async with endpoint(200, **{"x-warmroute-policy": "prefix"}) as url:
        with pytest.raises(PlanError, match="--allow-policy-header"):
            await measure(plan_of([Arm("random", (url,), "random")]))


@pytest.mark.parametrize(
    ("status", "cure"),
    [
        pytest.param(401, "--api-key", id="no key"),
        pytest.param(403, "--api-key", id="wrong key"),
        pytest.param(404, "/v1/models lists", id="wrong path or model"),
        pytest.param(503, "/ready", id="no pod yet"),
    ],
)
@pytest.mark.parametrize("model", [["--model", "m"], []], ids=["model named", "model asked for"])
async def test_a_refusal_comes_with_its_cure(
    status: int, cure: str, model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    async with endpoint(status) as url:
        assert await asyncio.to_thread(main, ["compare", "--url", url, "--quiet", *model]) == 2
    told = capsys.readouterr().err
    assert f"answers {status}" in told
    assert cure in told


@pytest.mark.parametrize(
    ("experiment", "path"), [(CHATS, "/v1/chat/completions"), (GROUPS, "/v1/completions")], ids=["chat", "completions"]
)
async def test_a_gateway_needs_only_the_endpoint_that_the_load_uses(experiment: Experiment, path: str) -> None:
    async with endpoint(200, only=path, **{"x-warmroute-policy": "random"}) as url:
        assert await check_arms(plan_of([Arm("random", (url,), "random")], experiment)) is False


async def test_a_pod_is_no_router_that_takes_policies() -> None:
    async with fleet(1) as urls:
        with pytest.raises(PlanError, match="takes no notice of x-warmroute-policy"):
            await measure(plan_of([Arm("random", (urls[0],), "random")]))


async def test_a_pod_without_counters_is_refused_before_the_load() -> None:
    async with fleet(1) as urls:
        with pytest.raises(PlanError, match=r"--pod http://127.0.0.1:9: its /metrics cannot be read"):
            await measure(plan_of([Arm("one", (urls[0],))], pods=["http://127.0.0.1:9"]))


async def test_the_model_that_is_asked_for_is_a_base_model_where_there_is_one() -> None:
    listed = [{"id": "adapter", "parent": "base"}, {"id": "base", "parent": None}]

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": listed})

    async with serving(models) as url:
        assert await first_model(url, {}) == "base"
        del listed[1]
        assert await first_model(url, {}) == "adapter"
        listed.clear()
        with pytest.raises(NotYet, match="lists no model yet"):
            await first_model(url, {})


async def test_what_comes_up_is_waited_for_and_what_does_not_is_told() -> None:
    told: list[str] = []
    answers = iter([NotYet("no pod"), NotYet("no pod"), 1, NotYet("the old router"), 2, 3, 4])

    async def check() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await patiently(check, wait_s=60, tell=told.append, pause_s=0.0) == 4, "well three times in a row"
    assert [t.partition(": ")[2] for t in told] == ["no pod", "the old router"]
    for wait_s, error in ((0, NotYet("at once")), (0.02, NotYet("in vain")), (60, PlanError("not to be cured"))):
        answers = iter([error] * 1000)
        with pytest.raises(type(error), match=str(error)):
            await patiently(check, wait_s=wait_s, tell=told.append, pause_s=0.001)


async def test_a_load_waits_for_all_pods_and_for_a_router_that_takes_policies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadtest.patience.PAUSE_S", 0.0)
    seen: list[str] = []

    async def router(request: web.Request) -> web.Response:
        seen.append(request.path)
        policy = request.headers.get("x-warmroute-policy", "prefix")
        looks = seen.count("/ready")
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "parent": None}]})
        if request.path == "/ready":
            return web.json_response({"reasons": [], "pods_known": 2, "pods_ready": 1 + (looks > 1)})
        obeys = looks > 3
        return web.json_response({}, headers={"x-warmroute-policy": policy if obeys else "prefix"})

    async with serving(router) as url:
        flags = ["--url", url, "--arms", "random", "--wait-s", "60", "--set", "nonsense=1"]
        assert await asyncio.to_thread(main, ["compare", *flags]) == 2, "a wrong setting is not waited for"
        assert not seen
        arms = ["--url", url, "--arms", "random", "--wait-s", "60", "--pod", "http://127.0.0.1:9"]
        assert await asyncio.to_thread(main, ["compare", *arms]) == 2
    told = capsys.readouterr().err
    assert "1 of 2 pods ready" in told
    assert "routed by 'prefix' though asked for 'random'" in told
    assert told.rstrip().endswith("its /metrics cannot be read; give the pod's own http://HOST:PORT"), "it went on"
    assert seen.count("/ready") == 6


def test_urls_are_taken_with_and_without_v1() -> None:
    assert base_url("http://h:1/v1/") == base_url("http://h:1") == "http://h:1"
    with pytest.raises(PlanError, match="must be http"):
        base_url("h:1")


async def test_nobody_there_is_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    status = await asyncio.to_thread(main, ["compare", "--url", "http://127.0.0.1:9", "--model", "m", "--quiet"])
    assert status == 2
    assert "does not answer" in capsys.readouterr().err


async def test_run_writes_three_reports_and_report_makes_them_again(tmp_path: Path) -> None:
    async with fleet(1) as urls:
        flags = ["--url", urls[0], "--pod", urls[0], "--scenario", "quick", "--quiet", "--out", str(tmp_path / "r")]
        flags += ["--set", "seconds=2.0", "--set", "warmup_s=0.5", "--set", "prefix_tokens=50", "--set", "groups=2"]
        assert await asyncio.to_thread(main, ["run", *flags, "--max-late-ms", "1e9"]) == 0
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".csv", ".html"}
    page = (tmp_path / "r.html").read_text()
    (tmp_path / "r.html").unlink()
    assert await asyncio.to_thread(main, ["report", str(tmp_path / "r.json")]) == 0
    assert (tmp_path / "r.html").read_text() == page
    assert json.loads((tmp_path / "r.json").read_text())["exact_lengths"] is False
