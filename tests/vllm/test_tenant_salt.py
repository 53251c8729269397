"""Tenants' salts before real vLLM: its request models read ours last, and no tenant finds another's blocks."""

import json
import os
import subprocess
from collections.abc import Iterator

import aiohttp
import pytest

from router.proxy.tenant import SALTLESS_ROUTES, with_salt
from tests.vllm.engines import VLLM_PYTHON, Engine, router

pytestmark = pytest.mark.vllm

TAKES_NO_CACHE = {
    "/detokenize",
    "/tokenize",
    "/start_profile",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
    "/v1/messages/count_tokens",
    "/v1/audio/transcriptions",  # forms: they pass as they are
    "/v1/audio/translations",
}
ASK_MODELS = """
import importlib, inspect, json, pkgutil, sys, typing
import vllm.entrypoints
from fastapi import APIRouter
from pydantic import BaseModel

def models(kind):
    if inspect.isclass(kind):
        return [kind] if issubclass(kind, BaseModel) else []
    return [m for part in typing.get_args(kind) for m in models(part)]

bodies, rows = json.load(sys.stdin), []
for module in pkgutil.walk_packages(vllm.entrypoints.__path__, "vllm.entrypoints."):
    if "api_router" in module.name:
        for router in vars(importlib.import_module(module.name)).values():
            for route in router.routes if isinstance(router, APIRouter) else ():
                kinds = [m for p in inspect.signature(route.endpoint).parameters.values() for m in models(p.annotation)]
                for kind in kinds if "POST" in getattr(route, "methods", ()) else ():
                    salt = None
                    if route.path in bodies:
                        salt = kind(**json.loads(bodies[route.path].encode())).cache_salt
                    refuses = kind.model_config.get("extra") == "forbid"
                    rows.append([route.path, "cache_salt" in kind.model_fields, refuses, salt])
json.dump(rows, sys.stderr)
"""
HELLO = [{"role": "user", "content": "hi"}]
OWN = {"model": "m", "cache_salt": "own"}
BODIES = {
    "/v1/chat/completions": {**OWN, "messages": HELLO},
    "/v1/completions": {**OWN, "prompt": "hi"},
    "/v1/responses": {**OWN, "input": "hi"},
    "/v1/messages": {**OWN, "messages": HELLO, "max_tokens": 1},
}


def test_every_route_of_vllm_takes_our_salt_or_is_named() -> None:
    bodies = {path: with_salt(json.dumps(body).encode(), "ours").decode() for path, body in BODIES.items()}
    env = {**os.environ, "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "CRITICAL"}
    argv = [str(VLLM_PYTHON), "-P", "-c", ASK_MODELS]
    done = subprocess.run(argv, input=json.dumps(bodies), env=env, capture_output=True, text=True, check=True)
    rows = json.loads(done.stderr.splitlines()[-1])
    assert {path: salt for path, _, _, salt in rows if salt is not None} == dict.fromkeys(BODIES, "ours")
    assert {path for path, takes, _, _ in rows if not takes} <= TAKES_NO_CACHE | SALTLESS_ROUTES
    assert not [path for path, _, refuses, _ in rows if refuses]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    found = Engine("tenants", blocks=500)
    try:
        found.start()
        found.wait()
        yield found
    finally:
        found.kill()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_tenant_finds_its_own_blocks_and_never_anothers(engine: Engine, path: str) -> None:
    text = f"{path} " + "the quick brown fox jumps over the lazy dog " * 40
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    body = {"model": "tiny", "temperature": 0, **chat}
    if path in ("/v1/completions", "/v1/responses"):
        kind, most = ("prompt", "max_tokens") if path == "/v1/completions" else ("input", "max_output_tokens")
        body = {"model": "tiny", "temperature": 0, kind: text, most: 16}
    settings = ("--tenant-header", "x-tenant", "--tenant-salt", "--key-seed", "secret")
    with router([engine], *settings, name="router-tenants") as r:
        await r.ready(1)
        async with aiohttp.ClientSession() as session:

            async def ask(tenant: str, **more: str) -> tuple[int, int]:
                sent = {**body, **more}
                async with session.post(r.url + path, json=sent, headers={"x-tenant": tenant}) as reply:
                    answer = await reply.json()
                    assert reply.status == 200, answer
                    return int(reply.headers["x-warmroute-matched-tokens"]), _cached(answer["usage"])

            assert await ask("a") == (0, 0)
            predicted, delivered = await ask("a")
            assert predicted == delivered > 0
            assert await ask("b") == (0, 0)
            assert await ask("a", cache_salt="own") == (0, 0)
            assert (await ask("a", cache_salt="own"))[1] == delivered
            assert await ask("b", cache_salt="own") == (0, 0)


def _cached(usage: dict) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0
