"""Failures and retries: H18 to H21, H64, and the rest of their kind. Pods count what they received; so do the tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter

import pytest

from router.core.types import WorkerAddress
from router.policy.pick import Refused
from router.policy.retry import RetryBudget
from tests.fakes.fake_pod import FakePod, Script, Served, echo, hello_stream
from tests.fakes.proxy_world import World, eventually, free_port, world

SHUTTING_DOWN = {
    "error": {"message": "cannot schedule new futures after shutdown", "type": "InternalServerError", "code": 500}
}


def answers(status: int, *headers: tuple[str, str], body: dict | None = None) -> Script:
    async def script(served: Served) -> None:
        await served.reply(status, body or {"error": {"message": f"says {served.pod.name}", "code": status}}, *headers)

    return script


async def resets(served: Served) -> None:
    served.reset()


async def message(w: World) -> tuple[int, str]:
    reply = await w.chat()
    return reply.status, json.loads(await reply.read())["error"]["message"]


# -- what is retried --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
async def test_back_pressure_goes_to_another_pod_and_is_nobodys_fault(status: int) -> None:
    async with world(answers(status), hello_stream) as w:
        assert (await (await w.chat(stream=True)).read()).endswith(b"[DONE]\n\n")
        assert [len(p.requests) for p in w.pods] == [1, 1]
        assert w.fleet.failures == Counter({"backpressure": 1})
        assert w.fleet.allows(WorkerAddress(w.pods[0].url))


async def test_when_all_refuse_the_client_gets_the_last_answer_with_its_retry_after() -> None:
    async with world(answers(429, ("Retry-After", "3")), answers(503, ("Retry-After", "17"))) as w:
        reply = await w.chat()
        assert (reply.status, reply.headers["Retry-After"]) == (503, "17")
        assert json.loads(await reply.read())["error"]["message"] == "says pod1"
        assert [len(p.requests) for p in w.pods] == [1, 1]


async def test_a_429_without_retry_after_gets_one() -> None:
    async with world(answers(429)) as w:
        reply = await w.chat()
        assert (reply.status, reply.headers["Retry-After"]) == (429, "1")


async def test_a_pods_answer_is_kept_when_the_next_one_cannot_be_reached() -> None:
    async with world(answers(429, ("Retry-After", "9"))) as w:
        w.fleet.urls.append(f"http://127.0.0.1:{free_port()}")
        reply = await w.chat()
        assert (reply.status, reply.headers["Retry-After"]) == (429, "9")


async def test_vllms_shutdown_500_goes_to_another_pod() -> None:
    async with world(answers(500, body=SHUTTING_DOWN), echo) as w:
        assert (await w.chat()).status == 200
        assert w.fleet.failures == Counter({"shutting_down": 1})
        assert [len(p.requests) for p in w.pods] == [1, 1]


async def test_vllms_shutdown_500_with_no_other_pod_is_a_503_to_try_again() -> None:
    async with world(answers(500, body=SHUTTING_DOWN)) as w:
        reply = await w.chat()
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")


async def test_a_long_refusal_is_passed_on_and_not_retried() -> None:
    async def script(served: Served) -> None:
        await served.reply(503, b"x" * 500_000)

    async with world(script, echo) as w:
        reply = await w.chat()
        assert (reply.status, len(await reply.read())) == (503, 500_000)
        assert len(w.pods[1].requests) == 0


# -- what is not ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 451])
async def test_h19_client_errors_come_through_from_one_pod(status: int) -> None:
    async with world(answers(status), echo) as w:
        reply = await w.chat()
        assert (reply.status, json.loads(await reply.read())["error"]["message"]) == (status, "says pod0")
        assert [len(p.requests) for p in w.pods] == [1, 0]
        assert w.fleet.failures.total() == 0


@pytest.mark.parametrize("status", [500, 501, 502, 504, 599])
async def test_other_server_errors_come_through_once_and_count_as_faults(status: int) -> None:
    async with world(answers(status), echo) as w:
        assert await message(w) == (status, "says pod0")
        assert w.bodies() == 1
        assert w.fleet.failures == Counter({"status_5xx": 1})


@pytest.mark.parametrize("status", [422, 503])
async def test_h18_exhausted_retries_are_never_a_200(status: int) -> None:
    async with world(answers(status), answers(status)) as w:
        got, text = await message(w)
        assert got == status
        assert text.startswith("says pod")
        assert w.bodies() == (1 if status == 422 else 2)


async def test_h18_resets_everywhere_are_one_502() -> None:
    async with world(resets, resets) as w:
        reply = await w.chat()
        assert reply.status == 502
        assert json.loads(await reply.read())["error"]["type"] == "server_error"
        assert w.bodies() == 1  # it may have run: never sent twice


async def test_h68_an_empty_pool_is_503() -> None:
    async with world() as w:
        w.fleet.urls.clear()
        reply = await w.chat()
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        assert json.loads(await reply.read())["error"]["code"] == 503


async def test_a_prompt_that_no_pod_takes_is_told_by_how_much(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.access")
    async with world(prompt_tokens=5000) as w:
        w.conductor.refuse_with = Refused("too_long")
        w.fleet.max_model_len_tokens = 4096
        reply = await w.chat()
        error = json.loads(await reply.read())["error"]
        assert (reply.status, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].endswith("every pod that serves this model: 5000 tokens, and the largest is 4096.")
        await eventually(lambda: caplog.records)
        assert caplog.records[0].fields["prompt_tokens"] == 5000  # type: ignore[attr-defined]


async def test_connect_limit_passes_over_a_pod_that_drops_packets() -> None:
    async with world(echo, connect_limit_s=0.3) as w:
        w.fleet.urls.insert(0, "http://192.0.2.1:80")  # TEST-NET-1: no route or no answer
        assert (await w.chat()).status == 200
        assert w.fleet.failures == Counter({"connect": 1})


async def test_names_that_do_not_resolve_are_connect_failures() -> None:
    async with world(echo) as w:
        w.fleet.urls.insert(0, "http://no-such-host.invalid:80")
        assert (await w.chat()).status == 200
        assert w.fleet.failures == Counter({"connect": 1})


# -- bounds -----------------------------------------------------------------------------------------------------


async def test_a_request_visits_few_pods() -> None:
    async with world(*[answers(503)] * 8, retry_attempts=3, retry_reserve=100) as w:
        assert (await w.chat()).status == 503
        assert w.bodies() == 3


async def test_a_sick_fleet_gets_its_load_multiplied_by_the_budget_only() -> None:
    async with world(*[answers(503)] * 4, retry_reserve=5, retry_budget_ratio=0.1, spread=True) as w:
        for _ in range(50):
            assert (await w.chat()).status == 503
        assert w.bodies() <= 50 + 5 + 0.1 * 50
        assert w.metrics.value("warmroute_retries_denied_total", reason="budget") > 0


def test_the_budget_is_a_share_of_requests_and_a_reserve() -> None:
    budget = RetryBudget(ratio=0.1, reserve_retries=3)
    assert [budget.spend() for _ in range(5)] == [True, True, True, False, False]
    for _ in range(10):
        budget.request()
    assert [budget.spend() for _ in range(2)] == [True, False]


async def test_the_breaker_opens_and_one_trial_closes_it() -> None:
    sick = True

    async def script(served: Served) -> None:
        if sick:
            await served.write(b"garbage\r\n\r\n")
        else:
            await echo(served)

    async with world(script, echo) as w:
        first = WorkerAddress(w.pods[0].url)
        for _ in range(3):
            assert (await w.chat()).status == 502
        assert not w.fleet.allows(first)
        assert (await w.chat()).status == 200  # by the other
        assert [len(p.requests) for p in w.pods] == [3, 1]
        await eventually(lambda: w.fleet.allows(first))
        assert (await w.chat()).status == 502  # the trial
        assert not w.fleet.allows(first)
        sick = False
        await eventually(lambda: w.fleet.allows(first))
        assert (await w.chat()).status == 200
        assert w.fleet.allows(first)
        assert [len(p.requests) for p in w.pods] == [5, 1]


# -- counts -----------------------------------------------------------------------------------------------------


async def test_h20_every_ending_gives_its_booking_back() -> None:
    """A hundred requests of ten endings; then the gauge reads 0 and no connection is left in use."""

    async def script(served: Served) -> None:
        ending = served.received.header("x-ending")
        if ending == "stream":
            await hello_stream(served)
        elif ending == "400":
            await answers(400)(served)
        elif ending == "500":
            await answers(500)(served)
        elif ending == "503":
            await answers(503)(served)
        elif ending == "reset":
            served.reset()
        elif ending == "garbage":
            await served.write(b"\x00\x01\x02\x03\x04\x05\x06\x07\r\n\r\n")
        elif ending == "cut":
            await served.begin_stream()
            await served.event("x")
            await asyncio.sleep(0.02)
            served.reset()
        elif ending == "silent":
            await served.wait_closed_by_peer()
        else:
            await echo(served)

    endings = ["json", "stream", "400", "500", "503", "reset", "garbage", "cut", "silent", "abort"]

    async def ask(w: World, ending: str) -> None:
        url = f"{w.url}/v1/chat/completions"
        with contextlib.suppress(Exception):
            async with asyncio.timeout(0.3 if ending == "abort" else 30):
                header = "silent" if ending == "abort" else ending
                reply = await w.session.post(url, json={"model": "m"}, headers={"x-ending": header})
                await reply.read()

    async with world(script, script, first_byte_limit_s=1.0, spread=True, retry_reserve=1000) as w:
        await asyncio.gather(*(ask(w, e) for e in endings * 10))
        await eventually(lambda: w.inflight == 0 and w.app.proxy.inflight == 0)
        for pod in w.pods:
            load = w.fleet.bookings.of(WorkerAddress(pod.url))
            assert (load.inflight_requests, load.prefill_tokens, load.decode_context_tokens) == (0, 0, 0)
        assert w.metrics.value("warmroute_inflight_requests") == 0
        assert w.app.proxy._bodies.held_bytes == 0
        await eventually(lambda: w.metrics.value("warmroute_pod_connections") <= len(w.app.parts.upstream._idle) * 100)  # type: ignore[attr-defined]
        idle = sum(len(q) for q in w.app.parts.upstream._idle.values())  # type: ignore[attr-defined]
        await eventually(lambda: w.metrics.value("warmroute_pod_connections") <= idle)


async def test_h21_a_request_that_outlives_its_pods_life_leaves_no_count() -> None:
    go = asyncio.Event()

    async def script(served: Served) -> None:
        await go.wait()
        await echo(served)

    async with world(script) as w:
        worker = WorkerAddress(w.pod.url)
        waiting = asyncio.create_task(w.chat())
        await eventually(lambda: w.bodies() == 1)
        w.fleet.bookings.retire(worker)  # removed and added again
        assert w.fleet.bookings.of(worker).inflight_requests == 0
        go.set()
        assert (await waiting).status == 200
        await eventually(lambda: w.app.proxy.inflight == 0)
        load = w.fleet.bookings.of(worker)
        assert (load.inflight_requests, load.prefill_tokens) == (0, 0)


async def test_h64_every_forwarded_request_is_booked_whatever_its_route() -> None:
    go = asyncio.Event()

    async def script(served: Served) -> None:
        await go.wait()
        await echo(served)

    async with world(script, script) as w:
        waiting = [asyncio.create_task(w.session.post(f"{w.url}/v1/untracked{n}", data=b"?")) for n in range(50)]
        await eventually(lambda: w.bodies() == 50)
        assert w.inflight == 50
        go.set()
        for reply in await asyncio.gather(*waiting):
            assert reply.status == 200
        await eventually(lambda: w.inflight == 0)


async def test_first_token_is_booked_when_the_first_byte_comes() -> None:
    go = asyncio.Event()

    async def script(served: Served) -> None:
        await served.begin_stream()
        await go.wait()
        await served.event("x")
        await served.wait_closed_by_peer()

    async with world(script) as w:
        load = w.fleet.bookings.of(WorkerAddress(w.pod.url))
        reply = await w.chat(stream=True)  # the head alone is no token
        assert (load.prefill_tokens, load.decode_context_tokens) == (7, 0)
        go.set()
        await reply.content.readany()
        assert (load.prefill_tokens, load.decode_context_tokens) == (0, 9)
        reply.close()
        await eventually(lambda: (load.prefill_tokens, load.decode_context_tokens, load.inflight_requests) == (0, 0, 0))


@pytest.mark.parametrize(
    "script",
    [answers(400), answers(422), answers(429), answers(500), answers(503), answers(500, body=SHUTTING_DOWN), resets],
)
async def test_what_a_pod_did_not_compute_is_not_expected_of_its_cache(script: Script) -> None:
    async with world(script) as w:
        assert (await w.chat()).status >= 400
        await eventually(lambda: w.conductor.voided == [WorkerAddress(w.pod.url)])


async def test_what_a_pod_computed_is_expected_of_its_cache() -> None:
    async with world(answers(429), echo) as w:
        assert (await w.chat()).status == 200
        await eventually(lambda: w.inflight == 0)
        assert w.conductor.voided == [WorkerAddress(w.pods[0].url)]


async def test_a_pod_killed_between_two_calls_costs_no_failed_call() -> None:
    async with world(echo, echo) as w:
        assert (await w.chat()).status == 200
        assert len(w.pods[0].requests) == 1
        await w.pods[0].stop()
        assert (await w.chat()).status == 200
        assert len(w.pods[1].requests) == 1


async def test_a_faulty_conductor_is_a_500_of_ours_and_one_logged_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with world() as w:

        def broken(*args: object, **kwargs: object) -> None:
            raise RuntimeError("a bug")

        w.conductor.choose = broken  # type: ignore[method-assign,assignment]
        status, text = await message(w)
        assert status == 500
        assert "a bug" not in text
        assert len([r for r in caplog.records if r.exc_info]) == 1


async def test_the_reference_upstream_serves_too() -> None:
    from router.proxy.upstream import AiohttpUpstream

    async with world(pods=[FakePod(answers(503)), FakePod(hello_stream)], upstream=AiohttpUpstream) as w:
        assert (await (await w.chat(stream=True)).read()).endswith(b"[DONE]\n\n")
        assert w.bodies() == 2
