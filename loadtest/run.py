"""Run a plan: arms in turn on the same pods, caches emptied between, every stage measured.

May import: the standard library, aiohttp, msgspec, the rooms of loadtest but the fleet.
"""

import os
import platform
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from loadtest.crowd import Live, Target
from loadtest.crowds import Crowds, Recipe
from loadtest.experiment import tool_definitions
from loadtest.pods import TIMEOUT, Pods, difference
from loadtest.samples import ArmRun, Gaps, Run, StageOutcome

EMULATED_FINGERPRINT = "warmroute-emulated-pod"  # system_fingerprint of loadtest.fleet


class PlanError(Exception):
    """The plan cannot be carried out; the text says why and what to do."""


class NotYet(PlanError):
    """It cannot be carried out now, and may be in a while."""


class Arm(msgspec.Struct, frozen=True):
    """One way to reach the pods: a policy of the router by header, or URLs taken in turn."""

    name: str
    urls: tuple[str, ...]
    policy: str | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what is sent where."""

    arms: Sequence[Arm]
    recipe: Recipe
    model: str
    pods: Sequence[str] = ()
    repeats: int = 1
    headers: Mapping[str, str] = {}
    extra_body: Mapping[str, Any] = {}
    timeout_s: float = 600.0
    drain_limit_s: float = 600.0
    late_limit_s: float = 0.05
    command: str = ""


_CURES = {
    401: "give the key with --api-key or WARMROUTE_API_KEY",
    403: "give the key with --api-key or WARMROUTE_API_KEY",
    404: "is --url a router or pod, without a path behind the port, and --model one that its /v1/models lists?",
    503: "wait until its /ready answers 200, which says what it waits for",
}
_OBEY = "start the router with --allow-policy-header, or compare URLs with --arm"
Watch = Callable[[str, str, int, int, Live], None]
"""(arm, stage, number of the stage counted over all arms, how many, live counts)."""


async def execute(plan: Plan, watch: Watch) -> Run:
    """All arms, all repeats. Raises PlanError before anything is sent when the plan cannot work."""
    emulated = await check_arms(plan)
    recipe = plan.recipe
    run = Run(
        name=recipe.experiment.name,
        workload=recipe.experiment.about or recipe.experiment.name,
        seed=recipe.seed,
        started_unix_s=time.time(),
        command=plan.command,
        machine=f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        target=", ".join(dict.fromkeys(u for a in plan.arms for u in a.urls)),
        model=plan.model,
        client_processes=recipe.client_processes,
        exact_lengths=recipe.tokenizer is not None,
        emulated="emulated pods, by their own word" if emulated else None,
        slo_ttft_s=recipe.experiment.client.slo_ttft_s,
        slo_tpot_s=recipe.experiment.client.slo_tpot_s,
        late_limit_s=plan.late_limit_s,
        runs=[],
    )
    async with Pods(plan.pods) as pods, Crowds(recipe) as crowds:
        if silent := set(pods.urls) - set(await pods.counters()):
            raise PlanError(f"--pod {min(silent)}: its /metrics cannot be read; give the pod's own http://HOST:PORT")
        run.emulated = _emulated(await pods.emulated(), recipe.speed) or run.emulated
        for repeat in range(plan.repeats):
            arms = plan.arms if repeat % 2 == 0 else list(reversed(plan.arms))  # a drift of the machine hits all alike
            for arm in arms:
                run.runs.append(await _run_arm(plan, arm, repeat, pods, crowds, watch, done=len(run.runs)))
    return run


async def _run_arm(plan: Plan, arm: Arm, repeat: int, pods: Pods, crowds: Crowds, watch: Watch, *, done: int) -> ArmRun:
    reset = await pods.reset(plan.model)
    headers = dict(plan.headers)
    if arm.policy is not None:
        headers["x-warmroute-policy"] = arm.policy
    target = Target(
        urls=arm.urls,
        model=plan.model,
        api=plan.recipe.experiment.client.api,
        headers=headers,
        extra_body=_extra_body(plan),
        timeout_s=plan.timeout_s,
        drain_limit_s=plan.drain_limit_s,
    )
    await crowds.begin(target, "" if reset else uuid.uuid4().hex)
    result = ArmRun(arm.name, repeat, [], reset)
    stages = crowds.workload.stages
    for n, stage in enumerate(stages):
        number = done * len(stages) + n + 1
        total = len(plan.arms) * plan.repeats * len(stages)

        def tell(live: Live, name: str = stage.name, number: int = number, total: int = total) -> None:
            watch(arm.name, name, number, total, live)

        before = await pods.counters()
        outcome = await crowds.run(n, tell)
        outcome.pods = difference(before, await pods.counters())
        late = [float(s["late_s"]) for s in await pods.emulated()]
        outcome.fleet_late_s = max(late) if late else None
        result.stages.append(in_emulated_time(outcome, plan.recipe.speed))
    return result


def _extra_body(plan: Plan) -> dict[str, Any]:
    client = plan.recipe.experiment.client
    tools = {"tools": tool_definitions(client.tools), "tool_choice": "none"} if client.tools else {}
    return tools | dict(plan.extra_body)


def in_emulated_time(stage: StageOutcome, speed: float) -> StageOutcome:
    """Durations in the pods' own seconds: what was measured times the speed. Lateness stays in real seconds."""
    if speed == 1.0:
        return stage
    for s in stage.samples:
        s.at_s *= speed
        s.e2e_s *= speed
        if s.ttft_s is not None:
            s.ttft_s *= speed
    stage.gaps = Gaps.scaled(stage.gaps, speed)
    stage.seconds *= speed
    stage.wall_s *= speed
    stage.rate_per_s /= speed
    return stage


def _emulated(states: Sequence[Mapping[str, Any]], speed: float) -> str | None:
    if not states:
        return None
    kinds = sorted({f"{s['profile']}{'' if s['calibrated'] else ' (uncalibrated)'}" for s in states})
    pace = "" if speed == 1.0 else f", at {speed:g} x real time; durations are in the pods' own seconds"
    speeds = {float(s["speed"]) for s in states}
    if speeds != {speed}:
        raise PlanError(
            f"the pods run at --speed {sorted(speeds)} and the load at {speed:g}; give both the same --speed"
        )
    return f"{len(states)} emulated pods, profile {', '.join(kinds)}{pace}"


async def check_arms(plan: Plan) -> bool:
    """One small request by each arm, so that a wrong URL, model or header shows before the load does.

    Returns whether an emulated pod answered.
    """
    emulated = False
    path, body = _small_request(plan)
    async with aiohttp.ClientSession(timeout=TIMEOUT, headers=dict(plan.headers)) as http:
        for arm in plan.arms:
            headers = {"x-warmroute-policy": arm.policy} if arm.policy else {}
            for url in arm.urls:
                try:
                    async with http.post(url + path, json=body, headers=headers) as reply:
                        text = await reply.text()
                        answered = reply.headers.get("x-warmroute-policy")
                except (aiohttp.ClientError, TimeoutError, OSError) as exc:
                    raise NotYet(f"{url} does not answer ({type(exc).__name__}); {_up(exc)}") from exc
                if reply.status != 200:
                    asked = f"to a request for model {plan.model!r}"
                    raise _refused(reply.status)(
                        f"{url} answers {reply.status} {asked}: {text[:300]}{_cure(reply.status)}"
                    )
                emulated = emulated or EMULATED_FINGERPRINT in text
                if arm.policy and answered not in (None, arm.policy):
                    raise NotYet(f"{url} routed by {answered!r} though asked for {arm.policy!r}; {_OBEY}")
                if arm.policy and answered is None and await _takes_any_policy(http, url + path, body):
                    raise NotYet(f"{url} takes no notice of x-warmroute-policy; {_OBEY}")
    return emulated


def _small_request(plan: Plan) -> tuple[str, dict[str, Any]]:
    """Of the kind that the load will be: not every gateway has both endpoints."""
    said = "Hello, is anybody there? One word will do."  # vLLM 0.32 on a CPU dies of a first prompt of three tokens
    body: dict[str, Any] = {"model": plan.model, "max_tokens": 1}
    if plan.recipe.experiment.client.api == "chat":
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": said}]}
    return "/v1/completions", {**body, "prompt": said}


async def _takes_any_policy(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> bool:
    """Whether a policy that nobody has is served too: then policies are not looked at, and all arms are the same."""
    try:
        async with http.post(url, json=body, headers={"x-warmroute-policy": "no-such"}) as reply:
            return reply.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False  # it answered a moment ago: the load will show


async def first_model(url: str, headers: Mapping[str, str]) -> str:
    """The first base model that the URL lists, or the first adapter if it lists adapters only. Raises PlanError."""
    try:
        async with (
            aiohttp.ClientSession(timeout=TIMEOUT, headers=dict(headers)) as http,
            http.get(url + "/v1/models") as reply,
        ):
            if reply.status != 200:
                raise _refused(reply.status)(f"{url}/v1/models answers {reply.status}{_cure(reply.status)}")
            data = (await reply.json())["data"]
            bases = [entry for entry in data if entry.get("parent") is None]
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        cure = f"is this the URL of a router or pod? {_up(exc)}"
        raise NotYet(f"{url}/v1/models cannot be read ({type(exc).__name__}); {cure}") from exc
    if not data:
        raise NotYet(f"{url}/v1/models lists no model yet; wait for a pod, or give --model")
    return str((bases or data)[0]["id"])


def _up(exc: Exception) -> str:
    if isinstance(exc, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not trusted here: set SSL_CERT_FILE to its CA (PEM)"
    return "is it up?"


def _refused(status: int) -> type[PlanError]:
    """No model yet, no pod yet, a router in between: these pass. A key that is wrong stays wrong."""
    return NotYet if status in (404, 429) or status >= 500 else PlanError


def _cure(status: int) -> str:
    return f"; {_CURES[status]}" if status in _CURES else ""
