"""The plain road: chat in, bytes out; models; pages; errors at the door; clients that leave."""

from __future__ import annotations

import asyncio
import json

import pytest
from yarl import URL

from router.policy.pick import Refused
from tests.fakes.fake_pod import FakePod, Served, echo, hello_stream
from tests.fakes.proxy_world import eventually, free_port, world


async def test_a_chat_streams_through_byte_for_byte() -> None:
    async with world(hello_stream) as w:
        reply = await w.chat(stream=True)
        got = await reply.read()
        assert reply.status == 200
        assert got.endswith(b"data: [DONE]\n\n")
        assert got.count(b"data: ") == 4
        assert w.pod.bodies == [b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": true}']
        await eventually(lambda: w.inflight == 0)


async def test_any_other_post_goes_by_model_and_load() -> None:
    async with world(echo) as w:
        reply = await w.session.post(URL(f"{w.url}/v1/newthing?x=%2F", encoded=True), json={"model": "m"})
        assert json.loads(await reply.read())["target"] == "/v1/newthing?x=%2F"
        assert [r.model for r in w.conductor.asked] == ["m"]
        reply = await w.session.post(f"{w.url}/pooling", data=b"\x00\x01")
        assert reply.status == 200
        assert w.conductor.asked[-1].model is None


async def test_models_is_the_union_and_503_until_a_pod_has_reported() -> None:
    async with world(models=("b", "a")) as w:
        listed = json.loads(await (await w.session.get(f"{w.url}/v1/models")).read())
        assert [m["id"] for m in listed["data"]] == ["a", "b"]
        one = await w.session.get(f"{w.url}/v1/models/a")
        assert json.loads(await one.read())["id"] == "a"
        assert (await w.session.get(f"{w.url}/v1/models/zz")).status == 404
        w.fleet.heard = False
        reply = await w.session.get(f"{w.url}/v1/models")
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")


async def test_pages_of_the_client_port() -> None:
    async with world() as w:
        assert (await w.session.get(f"{w.url}/health")).status == 200
        assert (await w.session.get(f"{w.url}/ready")).status == 200
        assert b"warmroute_requests_total" in await (await w.session.get(f"{w.url}/metrics")).read()
        assert (await w.session.get(f"{w.url}/debug/pods")).status == 404
        w.fleet.urls.clear()
        ready = await w.session.get(f"{w.url}/ready")
        assert (ready.status, json.loads(await ready.read())["reasons"]) == (503, ["no_pods"])
        assert (await w.session.get(f"{w.url}/ready?scope=self")).status == 200
        w.lifecycle.phase = "draining"
        assert (await w.session.get(f"{w.url}/ready?scope=self")).status == 503


async def test_debug_pages_on_the_client_port_when_asked_for() -> None:
    async with world(admin_on_main=True) as w:
        assert (await w.session.get(f"{w.url}/debug/pods")).status == 200
        reply = await w.session.post(f"{w.url}/debug/route", json={"model": "m", "prompt": "x"})
        assert json.loads(await reply.read())["endpoint"] == "/v1/completions"
        assert w.bodies() == 0


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_body"),
        (b"[]", 400, "invalid_body"),
        (b"", 400, "invalid_body"),
        (b'{"messages": []}', 400, 400),
        (b'{"model": 3}', 400, 400),
        (b'{"model": "nobody"}', 404, "model_not_found"),
    ],
)
async def test_bad_bodies_get_openai_errors_and_reach_no_pod(body: bytes, status: int, code: object) -> None:
    async with world() as w:
        reply = await w.session.post(f"{w.url}/v1/chat/completions", data=body)
        error = json.loads(await reply.read())["error"]
        assert (reply.status, error["code"]) == (status, code)
        assert error["message"]
        assert error["type"]
        assert w.bodies() == 0


async def test_a_dead_pod_is_passed_over() -> None:
    async with world(echo) as w:
        w.fleet.urls.insert(0, f"http://127.0.0.1:{free_port()}")
        reply = await w.chat()
        assert reply.status == 200
        assert w.metrics.value("warmroute_retries_total", reason="connect") == 1
        assert w.bodies() == 1


async def test_no_pod_at_all_is_503_with_retry_after() -> None:
    async with world(echo) as w:
        w.fleet.urls[:] = [f"http://127.0.0.1:{free_port()}"]
        for _ in range(2):  # found dead, then known dead
            reply = await w.chat()
            assert (reply.status, reply.headers["Retry-After"]) == (503, "1")


async def test_overload_is_429_with_retry_after() -> None:
    async with world() as w:
        w.conductor.refuse_with = Refused("overloaded")
        reply = await w.chat()
        assert (reply.status, reply.headers["Retry-After"]) == (429, "1")


async def test_decision_headers_and_policy_header() -> None:
    async with world(decision_headers=True, allow_policy_header=True, prompt_tokens=12) as w:
        body = {"model": "m", "messages": []}
        url = f"{w.url}/v1/chat/completions"
        reply = await w.session.post(url, json=body, headers={"x-warmroute-policy": "random"})
        assert reply.headers["x-warmroute-pod"] == w.pod.url
        assert reply.headers["x-warmroute-policy"] == "random"
        assert reply.headers["x-warmroute-prompt-tokens"] == "12"
        assert reply.headers["x-warmroute-matched-tokens"] == "0"
        assert w.pod.requests[0].header("x-warmroute-policy") is None
        assert (await w.session.post(url, json=body, headers={"x-warmroute-policy": "best"})).status == 400


async def test_a_client_that_leaves_before_the_first_byte_frees_the_pod() -> None:
    closed_s: list[float] = []

    async def silent(served: Served) -> None:
        closed_s.append(await served.wait_closed_by_peer())

    async with world(pods=[FakePod(silent)]) as w:
        request = asyncio.create_task(w.chat(stream=True))
        await eventually(lambda: w.bodies() == 1)
        assert w.inflight == 1
        left_s = asyncio.get_running_loop().time()
        request.cancel()
        await eventually(lambda: closed_s)
        assert closed_s[0] - left_s < 1.0 + 4.0  # "within a second", on a machine that may be busy
        await eventually(lambda: w.inflight == 0)
        await eventually(lambda: w.metrics.value("warmroute_client_gone_total") == 1)
