"""What people really put in front: openai, anthropic, LangChain, curl, nginx. Streaming and not."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

import openai
import pytest

from tests.fakes.fake_pod import FakePod, Served
from tests.fakes.nginx import needs_nginx, nginx
from tests.fakes.proxy_world import world

WORDS = ["Grüße", " aus", " 東京", " 🧪", "!"]


def chunk(delta: dict, **more: object) -> dict:
    choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
        **more,
    }


USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4}}


async def like_vllm(served: Served) -> None:
    """Chats and messages in the forms that vLLM gives them."""
    asked = json.loads(served.received.body)
    if served.received.target == "/v1/messages":
        await (messages_stream if asked.get("stream") else messages_whole)(served)
    elif asked["messages"][-1]["content"] == "fail":
        await served.reply(400, {"error": {"message": "not like this", "type": "BadRequestError", "code": 400}})
    elif asked.get("stream"):
        await chat_stream(served, asked)
    else:
        message = {"role": "assistant", "content": "".join(WORDS)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        whole = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": USAGE,
        }
        await served.reply(200, whole)


async def chat_stream(served: Served, asked: dict) -> None:
    await served.begin_stream()
    await served.event(chunk({"role": "assistant", "content": ""}))
    for word in WORDS:
        await served.event(chunk({"content": word}))
    if asked.get("stream_options", {}).get("include_usage"):
        await served.event({**chunk({}), "choices": [], "usage": USAGE})
    await served.event("[DONE]")
    await served.end()


async def messages_whole(served: Served) -> None:
    await served.reply(
        200,
        {
            "id": "msg_1", "type": "message", "role": "assistant", "model": "m",
            "content": [{"type": "text", "text": "".join(WORDS)}], "stop_reason": "end_turn", "stop_sequence": None,
            "usage": {"input_tokens": 7, "output_tokens": 5},
        },
    )  # fmt: skip


async def messages_stream(served: Served) -> None:
    await served.begin_stream()
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
               "stop_sequence": None, "usage": {"input_tokens": 7, "output_tokens": 0}}  # fmt: skip
    events: list[dict] = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": w}} for w in WORDS),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 5},
        },
        {"type": "message_stop"},
    ]
    for event in events:
        await served.chunk(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
    await served.end()


HELLO = [{"role": "user", "content": "hello"}]


async def test_openai_chats_streams_and_errors() -> None:
    async with world(like_vllm, keys=["sk-1"], forward_authorization=False) as w:
        async with openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="sk-1", max_retries=0) as client:
            assert [m.id async for m in client.models.list()] == ["m"]
            whole = await client.chat.completions.create(model="m", messages=HELLO)  # type: ignore[arg-type]
            assert whole.choices[0].message.content == "".join(WORDS)
            stream = await client.chat.completions.create(  # type: ignore[call-overload]
                model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
            got = [c async for c in stream]
            assert "".join(c.choices[0].delta.content or "" for c in got if c.choices) == "".join(WORDS)
            assert got[-1].usage.prompt_tokens_details.cached_tokens == 4
            with pytest.raises(openai.BadRequestError, match="not like this"):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "fail"}])
            with pytest.raises(openai.NotFoundError, match="not served"):
                await client.chat.completions.create(model="other", messages=HELLO)  # type: ignore[arg-type]
        async with openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        assert w.pod.requests[0].header("authorization") is None


async def test_openai_sees_a_stream_that_broke() -> None:
    async def script(served: Served) -> None:
        await served.begin_stream()
        await served.event(chunk({"content": "half"}))
        await asyncio.sleep(0.05)
        served.reset()

    async with world(script) as w, openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="-", max_retries=0) as client:
        got = []
        stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)  # type: ignore[call-overload]

        async def read() -> None:
            async for c in stream:
                got.append(c.choices[0].delta.content)  # noqa: PERF401

        with pytest.raises(openai.APIError, match="incomplete"):
            await read()
        assert got == ["half"]


async def test_a_pod_killed_between_two_calls_costs_an_openai_client_nothing() -> None:
    async with (
        world(like_vllm, like_vllm) as w,
        openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="-", max_retries=0) as client,
    ):
        for _ in range(3):
            whole = await client.chat.completions.create(model="m", messages=HELLO)  # type: ignore[arg-type]
            assert whole.usage is not None
            await w.pods[0].stop()
        assert [len(p.requests) for p in w.pods] == [1, 2]


async def test_anthropic_messages() -> None:
    anthropic = pytest.importorskip("anthropic", reason="pip install warmroute[clients]")
    async with (
        world(like_vllm, keys=["sk-1"]) as w,
        anthropic.AsyncAnthropic(base_url=w.url, api_key="sk-1", max_retries=0) as client,
    ):
        whole = await client.messages.create(model="m", max_tokens=9, messages=HELLO)
        assert whole.content[0].text == "".join(WORDS)
        async with client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream:
            assert "".join([t async for t in stream.text_stream]) == "".join(WORDS)
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="other", max_tokens=9, messages=HELLO)


async def test_langchain() -> None:
    langchain = pytest.importorskip("langchain_openai", reason="pip install warmroute[clients]")
    async with world(like_vllm) as w:
        chat = langchain.ChatOpenAI(base_url=f"{w.url}/v1", api_key="-", model="m", max_retries=0)
        assert (await chat.ainvoke("hello")).content == "".join(WORDS)
        assert "".join([c.content async for c in chat.astream("hello")]) == "".join(WORDS)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_with_2_mb_does_not_wait_for_100_continue(tmp_path: Path) -> None:
    body = json.dumps({"model": "m", "messages": HELLO, "pad": "x" * 2_000_000}).encode()
    (tmp_path / "body").write_bytes(body)
    async with world(like_vllm) as w:
        arguments = ["-sS", "--max-time", "30", "--data-binary", f"@{tmp_path / 'body'}", "-w", "\n%{http_code}"]
        arguments += ["-H", "Expect: 100-continue", "--expect100-timeout", "20", f"{w.url}/v1/chat/completions"]
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec("curl", *arguments, stdout=subprocess.PIPE)
        out, _ = await process.communicate()
        assert out.endswith(b"\n200")
        assert time.monotonic() - began < 15  # it would wait 20 s for an answer to its Expect
        assert w.pod.bodies == [body]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_h77_curl_uploads_a_chunked_form(tmp_path: Path) -> None:
    (tmp_path / "x.wav").write_bytes(os.urandom(200_000))
    async with world() as w:
        arguments = ["-sS", "-H", "Transfer-Encoding: chunked", "-F", f"file=@{tmp_path / 'x.wav'}", "-F", "model=m",
                     f"{w.url}/v1/audio/transcriptions"]  # fmt: skip
        process = await asyncio.create_subprocess_exec("curl", *arguments, stdout=subprocess.PIPE)
        await process.communicate()
        assert (tmp_path / "x.wav").read_bytes() in w.pod.bodies[0]
        assert w.conductor.asked[0].model == "m"


@pytest.mark.slow
@needs_nginx
@pytest.mark.parametrize("http_version", ["1.0", "1.1"])
async def test_h01_behind_nginx_with_its_default_buffering_events_come_as_they_are_sent(
    http_version: str, tmp_path: Path
) -> None:
    gap_s = 0.3

    async def script(served: Served) -> None:
        await served.begin_stream()
        await asyncio.sleep(0.1)  # a short prefill: what a first byte's time is a share of
        for n in range(3):
            await served.event({"n": n})
            await asyncio.sleep(gap_s)
        await served.end()

    async with world(pods=[FakePod(script)]) as w, nginx(w.port, tmp_path, http_version=http_version) as front:

        async def first_byte_s(base: str) -> float:
            began = time.monotonic()
            async with w.session.post(f"{base}/v1/chat/completions", json={"model": "m", "stream": True}) as reply:
                await reply.content.readany()
                first = time.monotonic() - began
                await reply.read()
                assert time.monotonic() - began > 2.5 * gap_s
            return first

        direct = statistics.median([await first_byte_s(w.url) for _ in range(5)])
        behind = statistics.median([await first_byte_s(front) for _ in range(5)])
        print(f"first byte: direct {direct * 1000:.1f} ms, behind nginx {behind * 1000:.1f} ms")
        assert behind < gap_s  # it did not wait for the stream to fill a buffer or to end
