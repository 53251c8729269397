"""The emulated fleet over real sockets: vLLM's surface, real KV events, faults."""

import asyncio
import base64
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import openai
import pytest
import zmq
from zmq.asyncio import Context

from loadtest.fleet import PodConfig, RunningPod, running_fleet
from loadtest.profile import Profile
from router.fleet.load import LoraLoad, parse_metrics

RECORDED = Path(__file__).parent.parent / "data" / "recorded"
PROFILE = Profile(
    name="test",
    model="tiny",
    prefill_tokens_per_s=100_000.0,
    t0_s=0.002,
    c_kv_s=0.0,
    c_seq_s=0.0,
    attention_equal_context_tokens=30_000.0,
    frontend_s=0.0,
    block_size_tokens=16,
    num_blocks=101,
    max_num_seqs=32,
    max_num_batched_tokens=2048,
    max_model_len_tokens=1400,
    sources={},
)
SYSTEM = "Answer in few words and never repeat the question. " * 12


@contextlib.asynccontextmanager
async def one_pod(**changes: object) -> AsyncIterator[tuple[RunningPod, aiohttp.ClientSession]]:
    config = msgspec.structs.replace(PodConfig(profile=PROFILE), **changes)
    async with (
        running_fleet([config]) as pods,
        aiohttp.ClientSession(pods[0].url, timeout=aiohttp.ClientTimeout(total=30)) as http,
    ):
        yield pods[0], http


async def ask(http: aiohttp.ClientSession, text: str, **more: object) -> dict:
    body = {"model": "tiny", "prompt": text, "max_tokens": 4, "ignore_eos": True, **more}
    async with http.post("/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


async def test_a_pod_with_one_slot_for_adapters_lets_the_second_wait() -> None:
    profile = msgspec.structs.replace(PROFILE, max_loras=1)
    async with one_pod(profile=profile, loras=("a", "b")) as (_, http):

        async def adapters() -> LoraLoad | None:
            async with http.get("/metrics") as reply:
                return parse_metrics(await reply.read(), now_s=0.0).lora

        assert await adapters() == LoraLoad(max_loras=1)
        first = asyncio.create_task(ask(http, "x", model="a", max_tokens=600))
        async with asyncio.timeout(20):
            while (lora := await adapters()) == LoraLoad(max_loras=1):
                await asyncio.sleep(0.01)
        assert lora == LoraLoad(max_loras=1, running=("a",), waiting=("a",))
        second = asyncio.create_task(ask(http, "x", model="b"))
        await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
        assert not second.done(), "it began after the first, longer one had ended"
        await second


async def test_it_counts_the_tokens_that_a_real_engine_counted() -> None:
    rows = [json.loads(line) for line in (RECORDED / "default" / "requests.jsonl").read_text().splitlines()]
    asked = [r for r in rows if "prompt_token_ids" in r and r.get("status") == 200]
    assert len(asked) > 10
    async with one_pod(profile=msgspec.structs.replace(PROFILE, num_blocks=1000)) as (_, http):
        for row in asked:
            body = row["body"]
            source = {k: v for k, v in body.items() if k in ("messages", "tools", "chat_template_kwargs", "prompt")}
            source |= {k: body[k] for k in ("add_generation_prompt", "continue_final_message") if k in body}
            if isinstance(body.get("prompt"), list):
                continue
            async with http.post("/tokenize", json={"model": "tiny", **source}) as reply:
                assert (await reply.json())["tokens"] == row["prompt_token_ids"], row["note"]


async def test_the_openai_client_streams_a_chat_and_gets_usage() -> None:
    async with (
        one_pod() as (pod, _),
        openai.AsyncOpenAI(base_url=pod.url + "/v1", api_key="-", max_retries=0) as client,
    ):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Which port?"}]
        cached = []
        for _ in range(2):
            stream = await client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=6, stream=True, stream_options={"include_usage": True}
            )
            chunks = [c async for c in stream]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            usage = chunks[-1].usage
            assert len(text.split()) == 6
            assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
            assert usage.completion_tokens == 6
            cached.append(usage.prompt_tokens_details.cached_tokens)
        assert cached[0] == 0
        assert cached[1] == (usage.prompt_tokens - 1) // 16 * 16


async def test_an_answer_comes_back_as_the_same_tokens_in_the_next_turn() -> None:
    async with one_pod() as (_, http):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Which port?"}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
        async with http.post("/v1/chat/completions", json=body) as reply:
            first = await reply.json()
        answer = first["choices"][0]
        messages += [
            {"role": "assistant", "content": answer["message"]["content"]},
            {"role": "user", "content": "Sure?"},
        ]
        async with http.post("/v1/chat/completions", json=body) as reply:
            second = await reply.json()
        whole = first["prompt_token_ids"] + answer["token_ids"]
        assert second["prompt_token_ids"][: len(whole)] == whole
        # the last generated token is never computed, so its block counts only if full without it
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(whole) - 1) // 16 * 16


async def test_its_metrics_have_the_names_and_labels_of_a_real_engine() -> None:
    real = (RECORDED / "default" / "metrics.txt").read_text()
    async with one_pod() as (_, http):
        await ask(http, SYSTEM)
        async with http.get("/metrics") as reply:
            text = await reply.text()
    samples = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(samples) > 20
    for line in samples:
        metric, _, rest = line.partition("{")
        name = metric.split(" ")[0]
        assert f"\n{name}" in real, name
        if rest and name != "vllm:cache_config_info":
            labels = {pair.split("=")[0] for pair in rest.split("}")[0].split(",")}
            known = [x for x in real.splitlines() if x.startswith(name + "{")]
            assert labels == {pair.split("=")[0] for pair in known[0].split("{")[1].split("}")[0].split(",")}, name


@pytest.mark.parametrize("form", ["map", "array"])
async def test_the_events_tell_exactly_what_the_pool_holds(form: str) -> None:
    """Counted from the wire with nothing but msgpack, through evictions, equal to the pod's own table."""
    async with one_pod(form=form) as (pod, http):
        context = Context()
        sub = context.socket(zmq.SUB)
        sub.setsockopt(zmq.LINGER, 0)
        sub.subscribe(b"")
        sub.connect(pod.pod.events_endpoint)
        try:
            for n in range(12):
                await ask(http, f"{n} {SYSTEM}", max_tokens=20)
            async with http.get("/emulated/blocks") as reply:
                truth = await reply.json()
            batches = await replay(context, pod.pod.replay_endpoint, 0)
            held: Counter[int] = Counter()
            tokens = {}
            for _, payload in batches:
                _, events, rank = msgspec.msgpack.decode(payload)
                assert rank == 0
                for event in events:
                    apply(event, held, tokens, form)
            assert [seq for seq, _ in batches] == list(range(truth["next_seq"]))
            assert held == {b["hash"]: b["copies"] for b in truth["blocks"]}
            assert all(tokens[b["hash"]] == b["token_ids"] for b in truth["blocks"])
            assert len(held) < 12 * 10, "nothing was evicted, so removals were not tried"
            live = await asyncio.wait_for(sub.recv_multipart(), 10)
            assert live[0].decode() == f"kv@127.0.0.1:{pod.port}@tiny"
            assert (int.from_bytes(live[1], "big"), live[2]) in batches
        finally:
            context.destroy(linger=0)


def apply(event: object, held: Counter[int], tokens: dict[int, list[int]], form: str) -> None:
    if form == "array":
        names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size")
        event = dict(zip(names if event[0] == "BlockStored" else names[:2], event, strict=False))
    assert isinstance(event, dict)
    if event["type"] == "BlockStored":
        for n, h in enumerate(event["block_hashes"]):
            held[h] += 1
            tokens[h] = event["token_ids"][n * 16 : (n + 1) * 16]
    else:
        assert event["type"] == "BlockRemoved"
        for h in event["block_hashes"]:
            held[h] -= 1
            assert held[h] >= 0
            if not held[h]:
                del held[h]


async def replay(context: Context, endpoint: str, first: int) -> list[tuple[int, bytes]]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(endpoint)
    await dealer.send_multipart([b"", first.to_bytes(8, "big")])
    out = []
    async with asyncio.timeout(20):
        while True:
            *_, seq, payload = await dealer.recv_multipart()
            if seq == b"\xff" * 8:
                return out
            out.append((int.from_bytes(seq, "big"), payload))


async def test_map_events_have_the_fields_of_a_real_engine() -> None:
    recorded = {}
    for line in (RECORDED / "default" / "frames.jsonl").read_text().splitlines():
        for event in msgspec.msgpack.decode(base64.b64decode(json.loads(line)["frames"][2]))[1]:
            recorded.setdefault(event["type"], set(event))
    async with one_pod() as (pod, http):
        for n in range(12):
            await ask(http, f"{n} {SYSTEM}")
        async with http.post("/reset_prefix_cache") as reply:
            assert (await reply.json()) == {"success": True}
        await ask(http, "a")
        context = Context()
        try:
            batches = await replay(context, pod.pod.replay_endpoint, 0)
        finally:
            context.destroy(linger=0)
    seen = {e["type"]: set(e) for _, payload in batches for e in msgspec.msgpack.decode(payload)[1]}
    assert seen == {name: recorded[name] for name in seen}
    assert set(seen) == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        pytest.param("/v1/chat/completions", b"{nonsense", 400, "BadRequestError", id="not JSON"),
        pytest.param("/v1/chat/completions", b'{"model":"tiny"}', 400, "BadRequestError", id="no messages"),
        pytest.param("/v1/completions", b'{"model":"other","prompt":"a"}', 404, "NotFoundError", id="unknown model"),
        pytest.param(
            "/v1/completions", b'{"model":"tiny","prompt":"a","cache_salt":""}', 400, "BadRequestError", id="salt"
        ),
        pytest.param("/v1/completions", b'{"model":"tiny","prompt":[1,-2]}', 400, "BadRequestError", id="token ids"),
        pytest.param(
            "/v1/completions", b'{"model":"tiny","prompt":"a","max_tokens":9999}', 400, "BadRequestError", id="room"
        ),
    ],
)
async def test_bad_requests_get_openai_errors(path: str, body: bytes, status: int, kind: str) -> None:
    async with one_pod() as (_, http), http.post(path, data=body) as reply:
        assert reply.status == status
        assert (await reply.json())["error"]["type"] == kind


async def test_a_client_that_leaves_frees_its_blocks() -> None:
    slow = msgspec.structs.replace(PROFILE, t0_s=0.05)
    async with one_pod(profile=slow) as (pod, http):
        body = {"model": "tiny", "prompt": SYSTEM, "max_tokens": 800, "ignore_eos": True, "stream": True}
        async with http.post("/v1/completions", json=body) as reply:
            await reply.content.readany()
            assert pod.pod.gauges().running == 1
            reply.close()
        await until(lambda: pod.pod.gauges().aborted_requests == 1, "aborted")
        assert pod.pod.gauges().running == 0
        assert pod.pod.gauges().kv_usage_ratio == 0


async def test_faults_on_command() -> None:
    async with one_pod() as (pod, http):
        body = {"model": "tiny", "prompt": "a b c", "max_tokens": 30, "ignore_eos": True, "stream": True}

        async def fault(**kind: object) -> None:
            async with http.post("/emulated/fault", json=kind) as reply:
                assert reply.status == 200

        await fault(kind="503", retry_after_s=7, count=1)
        async with http.post("/v1/completions", json=body) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (503, "7")
        async with http.post("/v1/completions", json=body) as reply:
            assert reply.status == 200, "only one request was to be hit"
            await reply.read()
        await fault(kind="shutdown")
        async with http.post("/v1/completions", json=body) as reply:
            assert "cannot schedule new futures" in (await reply.json())["error"]["message"]
        await fault(kind="reset", after_tokens=5)
        async with http.post("/v1/completions", json=body) as reply:
            assert reply.status == 200
            with pytest.raises(aiohttp.ClientError):
                await reply.read()
        await fault(kind="freeze", after_tokens=5)
        async with http.post("/v1/completions", json=body) as reply:
            got = await reply.content.readuntil(b"\n\n")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await reply.read()
            assert got.startswith(b"data: ")
        await fault(kind="none", health=True)
        async with http.get("/health") as reply:
            assert reply.status == 503
        assert pod.pod.faults.hits == 0


async def test_a_restart_is_a_new_life_on_the_same_ports() -> None:
    async with one_pod() as (pod, http):
        await ask(http, SYSTEM)
        ports = (pod.url, pod.pod.events_endpoint, pod.pod.replay_endpoint)
        began, seq = pod.pod.life.started_unix_s, pod.pod.life.publisher.next_seq
        await pod.restart()
        assert (pod.url, pod.pod.events_endpoint, pod.pod.replay_endpoint) == ports
        assert pod.pod.life.started_unix_s > began
        assert seq > 0
        assert pod.pod.life.publisher.next_seq == 0
        assert pod.pod.held() == {}
        reply = await ask(http, SYSTEM)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_sigterm_freezes_open_streams_and_closes_the_door() -> None:
    slow = msgspec.structs.replace(PROFILE, t0_s=0.02)
    async with one_pod(profile=slow) as (pod, http):
        body = {"model": "tiny", "prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
        async with http.post("/v1/completions", json=body) as reply:
            await reply.content.readany()
            await pod.stop(freeze=True)
            while not reply.content.at_eof():
                try:
                    async with asyncio.timeout(0.5):
                        await reply.content.readany()
                except TimeoutError:
                    break
            assert not reply.content.at_eof(), "the stream must neither go on nor end"
            async with aiohttp.ClientSession() as other:
                with pytest.raises(aiohttp.ClientConnectorError):
                    await other.get(pod.url + "/health")


async def test_the_command_prints_what_serve_takes(tmp_path: Path) -> None:
    import sys

    root = Path(__file__).parent.parent.parent
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtest", "fleet", "--pods", "3", "--processes", "2", "--port-base", "0", "--json"),
        stdout=asyncio.subprocess.PIPE,
        cwd=root,
    )
    try:
        ready = json.loads(await asyncio.wait_for(child.stdout.readline(), 60))
        assert len({p["url"] for p in ready["pods"]}) == 3
        async with aiohttp.ClientSession() as http:
            for p in ready["pods"]:
                assert p["spec"] == f"{p['url']},events={p['events']},replay={p['replay']}"
                async with http.get(p["url"] + "/kv_event_sources") as reply:
                    source = (await reply.json())["0"]
                assert source["endpoint"].rsplit(":", 1)[1] == p["events"].rsplit(":", 1)[1]
    finally:
        child.terminate()
        assert await asyncio.wait_for(child.wait(), 30) is not None
