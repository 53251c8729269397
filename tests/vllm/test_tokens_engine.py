"""One real engine: its own prompt ids for a thousand mixed requests, the canary, and the doctor."""

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
import pytest

from router.core.hashing import pack_tokens
from router.diagnosis import diagnose
from router.doctor import examine
from router.ops import Metrics
from router.tokenize.load import load
from router.tokenize.model import ModelOptions, ModelRenderer
from router.tokenize.port import PromptTokens
from router.tokenize.rendering import render_fully
from router.tokenize.service import TokenService
from tests.chats import requests
from tests.unit.tokenize.exported import TINY, tiny_exported, with_template
from tests.vllm.engines import Engine

pytestmark = pytest.mark.vllm
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules", "ad1=lora1")
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine("tokens", blocks=600, extra=(*LORA, *TOOLS))
    engine.start()
    try:
        engine.wait()
        yield engine
    finally:
        engine.kill()


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> Any:
    async with http.post(path, json=body) as reply:
        return await reply.json() if reply.status == 200 else None


async def test_a_thousand_mixed_requests_have_the_engines_ids(engine: Engine) -> None:
    renderer = ModelRenderer(load(str(TINY), offline=True, deadline_s=300), ModelOptions())
    compared, differed, names, salts = 0, [], {"tiny": 0, "ad1": 0}, 0
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(engine.url, timeout=timeout) as http:
        for n, (feature, path, body) in enumerate(requests(31, 2100)):
            if path not in ("/v1/chat/completions", "/v1/completions"):
                continue  # the others do not return ids
            model = ("tiny", "tiny", "ad1")[n % 3 if n % 2 else 0]
            body = {**body, "model": model, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
            if n % 5 == 0:
                body["cache_salt"] = f"tenant-{n % 7}"
            answer = await post(http, path, body)
            if answer is None:
                continue
            theirs = answer.get("prompt_token_ids") or answer["choices"][0].get("prompt_token_ids")
            ours = render_fully(renderer, path, msgspec.json.encode(body))
            compared += 1
            names[model] += 1
            salts += "cache_salt" in body
            if not isinstance(ours, PromptTokens) or ours.packed != pack_tokens(theirs):
                differed.append((feature, body))
    print(f"compared {compared}, different {len(differed)}, {names}, with salt {salts}")
    assert differed == []
    assert compared >= 1000
    assert min(names.values()) > 100
    assert salts > 100


async def test_the_canary_is_quiet_with_the_right_template_and_loud_with_a_wrong_one(engine: Engine) -> None:
    async with aiohttp.ClientSession(engine.url) as http:

        async def ask(model: str, question: bytes) -> bytes | None:
            async with http.post("/tokenize", data=question, headers={"Content-Type": "application/json"}) as reply:
                return await reply.read() if reply.status == 200 else None

        wrong = with_template("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
        for exported, suspect in ((tiny_exported(), False), (wrong, True)):
            metrics = Metrics()
            service = TokenService({"m": "x"}, loader=lambda *_, e=exported, **__: e, ask_pod=ask, metrics=metrics)
            await service.start()
            try:
                while any(m["state"] == "loading" for m in service.status()["models"].values()):
                    await asyncio.sleep(0.01)
                for feature, path, body in requests(8, 40):
                    if path == "/v1/chat/completions" and feature != "truncated":
                        await service.prompt(model="m", endpoint=path, body=msgspec.json.encode(body))
                        await asyncio.gather(*service._comparing)
                parity = service.status()["models"]["m"]["parity"]
            finally:
                await service.close()
            assert parity["suspect"] is suspect
            assert parity["compared"] >= 10
            assert metrics.value("warmroute_token_parity_total", result="different") == parity["differed"]
            assert bool(parity["differed"]) is suspect


async def test_the_doctor_finds_nothing_wrong(engine: Engine) -> None:
    facts = await examine(engine.url, events=None, tokenizer=str(TINY), api_key=None, wait_s=30)
    assert [f for f in diagnose(facts) if f.level == "bad"] == []
    assert facts.batches > 0
    assert facts.chats_compared > 40
    assert facts.predicted_tokens == facts.delivered_tokens == 128
