"""Tenants' salts over real sockets: what the pod gets, what routing is asked, who is refused."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from yarl import URL

from router import explain
from router.proxy.tenant import tenant_salt
from tests.fakes.fake_pod import echo, hello_stream
from tests.fakes.proxy_world import World, world

CHAT = b'{"model": "m",  "messages": [{"role": "user", "content": "h\xc3\xbc }"}], "n":1.0}\n'
SALT_A = tenant_salt("secret", b"a", None)


@pytest.fixture
async def w() -> AsyncIterator[World]:
    async with world(echo, tenant_header="x-tenant", tenant_salt=True, key_seed="secret") as found:
        yield found


async def send(
    w: World, body: bytes, path: str = "/v1/chat/completions", *, tenant: str | None = "a", **headers: str
) -> int:
    given = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    if tenant is not None:
        given["x-tenant"] = tenant
    reply = await w.session.post(URL(w.url + path, encoded=True), data=body, headers=given)
    await reply.read()
    return reply.status


async def test_the_pod_gets_every_byte_and_the_salt_and_routing_goes_by_it(w: World) -> None:
    assert await send(w, CHAT) == 200
    assert w.pod.bodies == [CHAT.rstrip()[:-1] + b',"cache_salt":"%b"}\n' % SALT_A.encode()]
    assert w.pod.requests[0].header("content-length") == str(len(w.pod.bodies[0]))
    assert w.pod.requests[0].header("x-tenant") == "a"
    assert [r.cache_salt for r in w.conductor.asked] == [SALT_A]
    assert w.metrics.value("warmroute_tenant_salts_total", result="put") == 1
    assert w.app.proxy._bodies.held_bytes == 0


async def test_compressed_and_chunked_bodies_get_it_too(w: World) -> None:
    assert await send(w, gzip.compress(CHAT), Content_Encoding="gzip") == 200
    assert json.loads(w.pod.bodies[0]) == {**json.loads(CHAT), "cache_salt": SALT_A}
    assert w.pod.requests[0].header("content-encoding") is None

    async def pieces() -> AsyncIterator[bytes]:
        for i in range(0, len(CHAT), 7):
            yield CHAT[i : i + 7]
            await asyncio.sleep(0)

    reply = await w.session.post(f"{w.url}/v1/chat/completions", data=pieces(), headers={"x-tenant": "a"})
    assert reply.status == 200
    assert json.loads(w.pod.bodies[1])["cache_salt"] == SALT_A


@pytest.mark.parametrize("path", ["/v1/complet%69ons", "/v1/completions?x=%7B", "/invocations", "/v1/embeddings"])
async def test_no_way_of_writing_a_route_goes_past_the_salt(w: World, path: str) -> None:
    assert await send(w, b'{"model":"m","cache_salt":"other"}', path) == 200
    assert json.loads(w.pod.bodies[0])["cache_salt"] == tenant_salt("secret", b"a", "other")
    assert w.pod.requests[0].target == path


async def test_without_a_tenant_nothing_runs_and_it_is_counted(w: World) -> None:
    assert await send(w, CHAT, tenant=None) == 400
    assert await send(w, CHAT, Content_Encoding="br") == 400
    assert w.bodies() == 0
    assert w.metrics.value("warmroute_tenant_salts_total", result="refused") == 2
    assert await send(w, b"\x00\x01", "/pooling", tenant=None) == 200
    assert w.metrics.value("warmroute_tenant_salts_total", result="no_json") == 1
    assert (await w.session.get(f"{w.url}/v1/models")).status == 200


async def test_the_api_key_is_the_tenant_and_its_bytes_stay_here() -> None:
    bounds = {"tenant_header": "authorization", "tenant_salt": True, "key_seed": "secret"}
    async with world(hello_stream, keys=["k-alpha", "k-beta"], **bounds) as w:
        for key in ("k-alpha", "k-beta"):
            assert await send(w, CHAT, tenant=None, Authorization=f"Bearer {key}") == 200
        salts = [json.loads(b)["cache_salt"] for b in w.pod.bodies]
        assert salts == [tenant_salt("secret", b"k-alpha", None), tenant_salt("secret", b"k-beta", None)]
        assert not any(b"k-alpha" in r.raw_head + r.body for r in w.pod.requests)


@pytest.mark.parametrize("path", ["/sleep", "/sl%65ep", "/finish_weight_update", "/fault_tolerance%2Fapply"])
async def test_a_route_that_acts_on_one_engine_is_known_however_it_is_written(path: str) -> None:
    async with world(echo) as w:
        assert await send(w, b"{}", path, tenant=None) == 403
        assert w.bodies() == 0


async def test_explain_asks_as_the_client_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Endpoint and headers reach the router: without them another prompt, or nobody's blocks, would be explained."""
    shown: list[dict] = []
    monkeypatch.setattr(explain, "show", shown.append)
    (tmp_path / "body.json").write_bytes(b'{"model":"m","prompt":"x"}')
    bounds = {"tenant_header": "x-tenant", "tenant_salt": True, "key_seed": "secret", "admin_on_main": True}
    async with world(echo, **bounds) as w:
        argv = [str(tmp_path / "body.json"), "--url", w.url, "--endpoint", "/v1/completions"]
        assert await asyncio.to_thread(explain.run, argv) == 1
        assert "x-tenant is needed" in capsys.readouterr().err
        assert await asyncio.to_thread(explain.run, [*argv, "--header", "x-tenant: a"]) == 0
    assert [row["endpoint"] for row in shown] == ["/v1/completions"]
