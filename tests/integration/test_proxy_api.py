"""API shapes and endpoints: H16, H17, H76, stored responses, keys and policies at the door."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest

from router.fleet.state import ModelEntry, Pod, PodSpec
from tests.fakes.fake_pod import FakePod, Script, Served, echo
from tests.fakes.proxy_world import eventually, free_port, world

# Read from vLLM 0.32's route decorators (entrypoints/), each with its method; `{...}` stands for a path parameter.
VLLM_POST_ROUTES = [
    "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/chat/completions/render",
    "/v1/chat/completions/derender", "/v1/completions", "/v1/completions/render", "/v1/completions/derender",
    "/v1/responses", "/v1/responses/render", "/v1/responses/{id}/cancel", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/messages/render", "/v1/embeddings", "/v2/embed", "/pooling", "/classify",
    "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/generative_scoring",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/cohere/v2/chat", "/tokenize", "/detokenize",
    "/invocations", "/ping", "/inference/v1/generate",
]  # fmt: skip
VLLM_GET_ROUTES = ["/tokenizer_info", "/ping", "/version", "/load", "/v1/responses/{id}"]


@pytest.mark.parametrize("path", VLLM_POST_ROUTES)
async def test_h16_every_post_route_of_vllm_reaches_a_pod(path: str) -> None:
    async with world() as w:
        target = path.replace("{id}", "resp_1")
        reply = await w.session.post(f"{w.url}{target}", json={"model": "m"})
        assert reply.status == 200
        assert json.loads(await reply.read())["target"] == target
        assert w.conductor.asked[0].model == "m"


@pytest.mark.parametrize("path", VLLM_GET_ROUTES)
async def test_h16_every_get_route_of_vllm_reaches_a_pod(path: str) -> None:
    async with world() as w:
        reply = await w.session.get(f"{w.url}{path.replace('{id}', 'resp_1')}")
        assert reply.status == 200
        assert w.bodies() == 1


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_h16_other_methods_pass_too(method: str) -> None:
    async with world() as w:
        reply = await w.session.request(method, f"{w.url}/v1/whatever", data=b"x")
        assert json.loads(await reply.read())["method"] == method


async def test_h16_shapes_nobody_knows_go_by_load_as_they_are() -> None:
    async with world() as w:
        for body in (b"", b"{", b"[1]", b'"m"', b'{"model": 7}', b"\xff\xfe\x00", b"{}" * 10):
            reply = await w.session.post(f"{w.url}/v1/newthing", data=body)
            assert reply.status == 200, body
            assert w.conductor.asked[-1].model is None
            assert w.pod.bodies[-1] == body


LORA_ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


async def test_control_routes_of_one_engine_are_not_passed_on() -> None:
    async with world() as w:
        for path in ("/sleep", "/reset_prefix_cache", "/collective_rpc", "/pause", *LORA_ROUTES):
            assert (await w.session.post(f"{w.url}{path}")).status == 403
        assert w.bodies() == 0
    async with world(forward_control_routes=True) as w:
        assert (await w.session.post(f"{w.url}/sleep")).status == 200


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{not json", 400, "not valid JSON"),
        (b'{"model":"m"', 400, "not valid JSON"),
        (b"\xff\xff", 400, "not valid JSON"),
        (b"[" * 100_000, 400, "not valid JSON"),
        (b'["m"]', 400, "JSON object"),
        (b"null", 400, "JSON object"),
        (b'{"messages":[]}', 400, "`model` is required"),
        (b'{"model":null}', 400, "`model` is required"),
        (b'{"model":["m"]}', 400, "`model` must be a string"),
        (b'{"model":""}', 404, "not served"),
        (b'{"model":"M"}', 404, "not served here; GET /v1/models lists"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_h17_each_fault_of_a_body_has_its_own_error(path: str, body: bytes, status: int, said: str) -> None:
    async with world() as w:
        reply = await w.session.post(f"{w.url}{path}", data=body, headers={"Content-Type": "application/json"})
        error = json.loads(await reply.read())["error"]
        assert (reply.status, said in error["message"]) == (status, True), error
        assert w.bodies() == 0


async def test_h17_deeper_checks_stay_with_vllm() -> None:
    async def script(served: Served) -> None:
        await served.reply(400, {"error": {"message": "messages: not a list", "type": "BadRequestError"}})

    async with world(script) as w:
        reply = await w.chat(messages=123)
        assert (reply.status, json.loads(await reply.read())["error"]["message"]) == (400, "messages: not a list")
        assert w.bodies() == 1


async def test_h76_models_are_503_until_one_pod_has_reported_and_so_are_requests() -> None:
    async with world(heard=False) as w:
        for reply in (await w.session.get(f"{w.url}/v1/models"), await w.chat()):
            assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
            assert json.loads(await reply.read())["error"]["type"] == "server_error"


async def test_h76_the_real_fleets_list_is_stable_and_a_clash_has_a_fixed_winner() -> None:
    from router.fleet.fleet import Fleet
    from router.fleet.state import FleetState

    def pod(identity: str, *entries: tuple[str, int]) -> Pod:
        models = tuple(ModelEntry(id=m, max_model_len_tokens=n, raw={"id": m, "max_model_len": n}) for m, n in entries)
        return Pod(spec=PodSpec(identity=identity, name=identity, url=f"http://{identity}"), models=models)

    fleet = Fleet()
    fleet.state = FleetState({"b": pod("b", ("z", 1), ("x", 2)), "a": pod("a", ("x", 3), ("y", 4))})
    listed = [fleet.model_list() for _ in range(3)]
    assert listed[0] == listed[1] == listed[2]
    assert [(m["id"], m["max_model_len"]) for m in listed[0]] == [("x", 2), ("y", 4), ("z", 1)]


async def test_models_with_a_slash_are_found_raw_and_encoded() -> None:
    async with world(models=["org/name"]) as w:
        for name in ("org/name", "org%2Fname"):
            reply = await w.raw(f"GET /v1/models/{name} HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n".encode())
            assert reply.startswith(b"HTTP/1.1 200")
        head = await w.raw(b"HEAD /v1/models HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert head.endswith(b"\r\n\r\n")


async def test_a_slash_after_models_is_no_name() -> None:
    async with world() as w:
        assert json.loads(await (await w.session.get(f"{w.url}/v1/models/")).read())["object"] == "list"


async def test_a_model_that_is_not_known_is_asked_for_before_it_is_a_404() -> None:
    async with world() as w:
        w.fleet.loaded_since = ["adapter"]
        assert (await w.chat(model="adapter")).status == 200
        assert (await w.chat(model="unknown")).status == 404


async def test_a_404_of_a_pod_that_lists_the_model_has_its_models_read_again_and_comes_through() -> None:
    async def script(served: Served) -> None:
        await served.reply(404, {"error": {"message": "The model `m` does not exist."}})

    async with world(script, script) as w:
        assert (await w.chat()).status == 404
        assert (w.bodies(), w.fleet.doubts) == (1, 1), "H19: a 4xx is never tried again"


# -- stored responses -------------------------------------------------------------------------------------------


def stores(replies: Sequence[dict], *, streamed: bool = False) -> Script:
    """A pod that stores what it answers, in its own memory, as vLLM does."""
    held: dict[str, dict] = {}
    waiting = list(replies)

    async def script(served: Served) -> None:
        path = served.received.target.split("?")[0]
        known = json.loads(served.received.body or b"{}").get("previous_response_id")
        if path == "/v1/responses" and known is not None and known not in held:
            await served.reply(404, {"error": {"message": "no such response", "type": "invalid_request_error"}})
        elif path == "/v1/responses":
            answer = waiting.pop(0)
            held[answer["id"]] = answer
            if streamed:
                await served.begin_stream()
                await served.chunk(b"event: response.created\nda")
                created = {"type": "response.created", "response": answer}
                await served.chunk(b"ta: " + json.dumps(created).encode() + b"\n\n")
                await served.end()
            else:
                await served.reply(200, answer)
        elif path.split("/")[3] in held:
            await served.reply(200, held[path.split("/")[3]])
        else:
            await served.reply(404, {"error": {"message": "no such response", "type": "NotFoundError"}})

    return script


@pytest.mark.parametrize("streamed", [False, True])
async def test_stored_responses_are_fetched_from_the_pod_that_made_them(streamed: bool) -> None:
    pods = [FakePod(stores([{"id": f"resp_{n}_{k}"} for k in range(3)], streamed=streamed)) for n in range(3)]
    async with world(pods=pods, spread=True) as w:
        for _ in range(6):
            await (await w.session.post(f"{w.url}/v1/responses", json={"model": "m", "input": "x"})).read()
        before = Counter({p.url: len(p.requests) for p in pods})
        for n in range(3):
            for k in range(2):
                reply = await w.session.get(f"{w.url}/v1/responses/resp_{n}_{k}?include=x")
                assert json.loads(await reply.read())["id"] == f"resp_{n}_{k}"
            assert (await w.session.post(f"{w.url}/v1/responses/resp_{n}_0/cancel")).status == 200
        asked = Counter({p.url: len(p.requests) for p in pods}) - before
        assert set(asked.values()) == {3}  # nobody was asked in vain


async def test_a_follow_up_goes_to_the_pod_that_holds_its_beginning() -> None:
    pods = [FakePod(stores([{"id": f"resp_{n}_{k}"} for k in range(9)])) for n in range(3)]
    async with world(pods=pods, spread=True) as w:
        url = f"{w.url}/v1/responses"
        first = json.loads(await (await w.session.post(url, json={"model": "m", "input": "x"})).read())["id"]
        for _ in range(4):
            body = {"model": "m", "input": "y", "previous_response_id": first}
            reply = json.loads(await (await w.session.post(url, json=body)).read())
            assert reply["id"].startswith(first[:7])


async def test_a_response_another_router_stored_is_looked_for_pod_by_pod() -> None:
    pods = [FakePod(stores([])), FakePod(stores([])), FakePod(stores([{"id": "resp_far"}, {"id": "resp_next"}]))]
    async with world(pods=pods) as w:
        async with w.session.post(f"{pods[2].url}/v1/responses", json={}) as made:
            assert made.status == 200
        reply = await w.session.get(f"{w.url}/v1/responses/resp_far")
        assert json.loads(await reply.read())["id"] == "resp_far"
        follow_up = {"model": "m", "input": "y", "previous_response_id": "resp_far"}
        made_there = await w.session.post(f"{w.url}/v1/responses", json=follow_up)
        assert json.loads(await made_there.read())["id"] == "resp_next", (
            "after a restart of the router, or by another one"
        )
        missing = await w.session.get(f"{w.url}/v1/responses/resp_none")
        assert missing.status == 404
        assert json.loads(await missing.read())["error"]["message"] == "no such response"
        assert w.fleet.failures.total() == 0


# -- keys -------------------------------------------------------------------------------------------------------


async def test_keys_open_everything_but_the_probes() -> None:
    async with world(keys=["alpha", "beta"], admin_on_main=True) as w:
        for path in ("/health", "/ready", "/ready?scope=self"):
            assert (await w.session.get(f"{w.url}{path}")).status == 200
        told = json.loads(await (await w.session.get(f"{w.url}/ready")).read())
        assert set(told) == {"ready", "reasons", "pods_known", "pods_ready"}, "names and addresses need a key"
        all_told = await w.session.get(f"{w.url}/ready", headers={"x-api-key": "beta"})
        assert "pods_not_ready" in json.loads(await all_told.read())
        for path in ("/metrics", "/v1/models", "/debug/pods", "/v1/anything", "/nothing"):
            reply = await w.session.get(f"{w.url}{path}")
            assert (reply.status, json.loads(await reply.read())["error"]["type"]) == (401, "authentication_error")
            for header in ("Bearer alpha", "bearer beta"):
                allowed = await w.session.get(f"{w.url}{path}", headers={"Authorization": header})
                assert allowed.status == 200
        for header in ("Bearer alphaa", "Bearer alph", "Bearer ", "Basic alpha", "alpha", "Bearer ÿ"):
            assert (await w.session.get(f"{w.url}/v1/models", headers={"Authorization": header})).status == 401
        assert (await w.session.get(f"{w.url}/v1/models", headers={"x-api-key": "beta"})).status == 200
        body = b"x" * 5_000_000
        assert (await w.session.post(f"{w.url}/v1/completions", data=body)).status == 401


@pytest.mark.parametrize(
    ("keys", "limits", "expected"),
    [
        ([], {}, "Bearer alpha"),  # the router asks for none: it is the pods' key
        (["alpha"], {}, None),  # the router's own key stays here
        (["alpha"], {"forward_authorization": True}, "Bearer alpha"),
        ([], {"forward_authorization": False}, None),
        (["alpha"], {"pod_api_key": "inner"}, "Bearer inner"),
        ([], {"pod_api_key": "inner"}, "Bearer inner"),
    ],
)
async def test_h15_which_authorization_reaches_the_pods(keys: list[str], limits: dict, expected: str | None) -> None:
    async with world(keys=keys, **limits) as w:
        headers = {"Authorization": "Bearer alpha", "x-api-key": "alpha"}
        reply = await w.session.post(f"{w.url}/v1/chat/completions", json={"model": "m"}, headers=headers)
        assert reply.status == 200
        assert w.pod.requests[0].all("authorization") == ([] if expected is None else [expected])
        assert w.pod.requests[0].header("x-api-key") == ("alpha" if expected == "Bearer alpha" else None)


async def test_a_page_in_a_browser_gets_its_preflight_its_models_and_its_errors() -> None:
    """As from vLLM, whose preflight needs no key and whose replies any page may read."""
    page = {"Origin": "http://page.example"}
    asks = {**page, "Access-Control-Request-Method": "POST"}
    async with world(keys=["alpha"]) as w:
        chat = f"{w.url}/v1/chat/completions"
        assert (await w.session.options(chat, headers=asks)).status == 200
        assert [r.method for r in w.pod.requests] == ["OPTIONS"]
        assert (await w.session.options(chat, headers=page)).status == 401
        assert (await w.session.options(chat, headers=asks, data=b"x")).status == 401
        refused = await w.session.post(chat, headers=page)
        assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (401, "*")
        key = {"Authorization": "Bearer alpha"}
        models = await w.session.get(f"{w.url}/v1/models", headers={**page, **key})
        assert models.headers["Access-Control-Allow-Origin"] == "*"
        plain = await w.session.get(f"{w.url}/v1/models", headers=key)
        assert "Access-Control-Allow-Origin" not in plain.headers


async def test_anthropics_endpoint_gets_errors_in_its_own_form() -> None:
    async with world() as w:
        reply = await w.session.post(f"{w.url}/v1/messages", json={"model": "nobody"})
        body = json.loads(await reply.read())
        assert (reply.status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")


async def test_the_policy_header_counts_only_when_it_is_allowed() -> None:
    async with world() as w:
        url = f"{w.url}/v1/chat/completions"
        assert (
            await w.session.post(url, json={"model": "m"}, headers={"x-warmroute-policy": "nonsense"})
        ).status == 200
        assert w.conductor.asked[0].policy is None
        assert w.pod.requests[0].header("x-warmroute-policy") is None


async def test_decision_headers_name_the_pod_that_answered() -> None:
    async with world(echo, decision_headers=True, prompt_tokens=5) as w:
        w.fleet.urls.insert(0, f"http://127.0.0.1:{free_port()}")
        reply = await w.chat()
        assert reply.headers["x-warmroute-pod"] == w.pod.url
        await eventually(lambda: w.inflight == 0)


async def test_what_routing_is_told() -> None:
    async with world() as w:
        await w.session.post(
            f"{w.url}/v1/completions?a=b",
            data=b'{"model":"m","prompt":"x","cache_salt":"s","echo":true,"logprobs":1}',
        )
        asked = w.conductor.asked[0]
        assert (asked.endpoint, asked.model, asked.cache_salt, asked.skips_cache) == ("/v1/completions", "m", "s", True)
        assert asked.body == w.pod.bodies[0]
        await w.session.post(f"{w.url}/v1/completions", json={"model": "m", "prompt_logprobs": 0})
        assert w.conductor.asked[1].skips_cache
        await w.session.post(f"{w.url}/v1/completions", json={"model": "m", "echo": True, "logprobs": None})
        assert not w.conductor.asked[2].skips_cache
