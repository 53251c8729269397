"""What operators rely on: H15, H69, H70, H72, and the rest of their kind: limits, TLS, drain, log lines."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path

import aiohttp
import pytest

from router.ops import JsonLines, TextLines, setup_logging
from router.proxy.drain import drain
from router.settings import ServeSettings, read
from router.tls import renewed, server_tls
from tests.fakes.fake_pod import FakePod, Served, echo, hello_stream
from tests.fakes.proxy_world import World, eventually, eventually_async, free_port, world

SECRETS = ["sk-TOPSECRET", "COOKIESECRET", "PROMPTSECRET", "SALTSECRET", "QUERYSECRET", "REPLYSECRET", "PATHSECRET"]


@pytest.fixture
def everything_logged() -> Iterator[io.StringIO]:
    """All log lines of all loggers at debug, as both formatters write them."""
    text = io.StringIO()
    handlers = []
    root = logging.getLogger()
    before = (
        root.level,
        {n: logging.getLogger(n).level for n in ("warmroute", "router", "indexer", "aiohttp", "asyncio")},
    )
    kept = list(root.handlers)
    for form, formatter in (("json", JsonLines()), ("text", TextLines())):
        setup_logging(level="debug", form=form)
        handler = logging.StreamHandler(text)
        handler.setFormatter(formatter)
        handlers.append(handler)
    root.handlers[:] = [*kept, *handlers]
    yield text
    root.handlers[:] = kept
    root.setLevel(before[0])
    for name, level in before[1].items():
        logging.getLogger(name).setLevel(level)


async def test_h15_no_secret_in_any_log_line_or_error(everything_logged: io.StringIO) -> None:
    async def script(served: Served) -> None:
        match served.number % 4:
            case 0:
                await served.reply(200, b"REPLYSECRET")
            case 1:
                await served.write(b"HTTP/1.1 200 OK\r\nREPLYSECRET\r\n\r\n")
            case 2:
                served.reset()
            case _:
                await served.begin_stream()
                await served.event("REPLYSECRET")
                await asyncio.sleep(0.02)
                served.reset()

    body = {"model": "m", "cache_salt": "SALTSECRET", "messages": [{"role": "user", "content": "PROMPTSECRET"}]}
    headers = {"Authorization": "Bearer sk-TOPSECRET", "Cookie": "s=COOKIESECRET"}
    errors = ""
    async with world(script) as w:
        url = f"{w.url}/v1/chat/completions?key=QUERYSECRET"
        bad = [
            json.dumps(body)[:-1],
            json.dumps({**body, "model": 5}),
            '{"model":"m","messages":"PROMPTSECRET',
            '"PROMPTSECRET"',
        ]
        for data in [json.dumps(body)] * 8 + bad:
            with contextlib.suppress(aiohttp.ClientError):
                reply = await w.session.post(url, data=data, headers=headers)
                if reply.status >= 400:
                    errors += await reply.text() + str(reply.headers)
        for path in ("/PATHSECRET", "/v1/PATHSECRET", "/debug/PATHSECRET"):
            await w.session.get(f"{w.url}{path}", headers=headers)
        w.fleet.urls[:] = [f"http://127.0.0.1:{free_port()}"]
        errors += await (await w.session.post(url, json=body, headers=headers)).text()
        errors += (
            await w.raw(b"POST /x HTTP/1.1\r\nAuthorization: sk-TOPSECRET\r\nbroken PROMPTSECRET\r\n\r\n")
        ).decode()
        metrics = w.metrics.render().decode()
    logged = everything_logged.getvalue()
    assert logged.count("/v1/chat/completions") > 10  # lines are there
    for secret in SECRETS:
        assert secret not in logged
        assert secret not in errors
        assert secret not in metrics


async def test_probes_are_logged_only_when_they_fail(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.access")
    async with world() as w:
        for phase, status in (("serving", 200), ("draining", 503)):
            w.lifecycle.phase = phase  # type: ignore[assignment]
            for path in ("/health", "/ready"):
                reply = await w.session.get(f"{w.url}{path}")
                assert reply.status == (status if path == "/ready" else 200)
        await eventually(lambda: caplog.records)
        assert [r.fields["status"] for r in caplog.records] == [503]  # type: ignore[attr-defined]


async def test_one_structured_access_line_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.access")
    async with world(hello_stream, prompt_tokens=12) as w:
        reply = await w.session.post(
            f"{w.url}/v1/chat/completions?secret=1", json={"model": "m"}, headers={"X-Request-Id": "abc"}
        )
        size = len(await reply.read())
        await eventually(lambda: caplog.records)
        line = json.loads(JsonLines().format(caplog.records[0]))
        assert line["message"] == "request"
        expected = {
            "method": "POST", "endpoint": "/v1/chat/completions", "status": 200, "request_id": "abc", "model": "m",
            "pod": w.pod.url, "policy": "prefix", "reason": "load", "prompt_tokens": 12, "matched_tokens": 0,
            "attempts": 1, "bytes_in": 14, "bytes_out": size, "client": "127.0.0.1",
        }  # fmt: skip
        assert {k: line.get(k) for k in expected} == expected
        assert 0 < line["ttft_ms"] <= line["duration_ms"]
        assert len(caplog.records) == 1


async def test_h72_random_paths_make_no_new_series() -> None:
    async with world() as w:
        for n in range(500):
            await w.session.get(f"{w.url}/{n}")
            if n % 100 == 0:
                await w.session.post(f"{w.url}/v1/thing{n}", data=b"x")
        labels = {
            s.labels["endpoint"]
            for m in w.metrics.registry.collect()
            for s in m.samples
            if s.name == "warmroute_requests_total"
        }
        assert labels == {"other"}
        assert w.metrics.value("warmroute_requests_total", endpoint="other", status="200") == 505


# -- limits of connections --------------------------------------------------------------------------------------


async def test_a_head_that_comes_too_slowly_ends_its_connection() -> None:
    async with world(request_head_limit_s=0.3) as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
        for piece in (b"GET /health HTTP/1.1\r\n", b"X-A: 1\r\n", b"X-B: 2\r\n", b"X-C: 3\r\n", b"X-D: 4\r\n"):
            with contextlib.suppress(ConnectionError):
                writer.write(piece)
            await asyncio.sleep(0.1)
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


async def test_a_head_that_begins_at_once_and_never_ends_is_slow_too() -> None:
    """The first bytes are there before anybody waits for a request, and no others ever come."""
    async with world(request_head_limit_s=0.3, client_idle_limit_s=60.0) as w:
        for first in (b"G", b"GET /health HTTP/1.1\r\nHost: r\r\n"):
            with contextlib.closing(socket.create_connection(("127.0.0.1", w.port))) as client:
                client.sendall(first)  # before the loop here has accepted the connection
                client.setblocking(False)
                async with asyncio.timeout(10):
                    with contextlib.suppress(ConnectionError):
                        assert await asyncio.get_running_loop().sock_recv(client, 100) == b""


async def test_a_slow_head_on_a_connection_that_was_used_ends_it_too() -> None:
    async with world(request_head_limit_s=0.3, client_idle_limit_s=1.0) as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.5)  # idle is not slow
        writer.write(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\nGET /hea")
        async with asyncio.timeout(10):
            rest = await reader.read()
        assert rest.count(b"HTTP/1.1 200") == 1
        writer.close()


async def test_a_body_that_stops_coming_is_a_408() -> None:
    async with world(request_body_idle_limit_s=0.3) as w:
        got = await w.raw(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 100\r\n\r\n{")
        assert got.startswith(b"HTTP/1.1 408 ")
        assert w.bodies() == 0


async def test_idle_connections_are_closed_at_their_limit() -> None:
    async with world(client_idle_limit_s=0.3) as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()


async def test_connections_of_one_client_are_bounded() -> None:
    async with world(connections_per_client=3) as w:
        held = [await asyncio.open_connection("127.0.0.1", w.port) for _ in range(3)]
        await eventually(lambda: w.metrics.value("warmroute_client_connections") == 3)
        with contextlib.suppress(ConnectionError):
            assert await w.raw(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n") == b""
        assert w.metrics.value("warmroute_connections_refused_total", reason="connections_per_client") >= 1
        held[0][1].close()
        await eventually(lambda: w.metrics.value("warmroute_client_connections") == 2)
        assert (await w.raw(b"GET /health HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")).startswith(
            b"HTTP/1.1 200"
        )
        for _, writer in held:
            writer.transport.abort()
        await eventually(lambda: w.metrics.value("warmroute_client_connections") == 0)


async def test_connections_in_all_are_bounded() -> None:
    async with world(connections_max=2) as w:
        held = [await asyncio.open_connection("127.0.0.1", w.port) for _ in range(2)]
        await eventually(lambda: w.metrics.value("warmroute_client_connections") == 2)
        with contextlib.suppress(ConnectionError):
            assert await w.raw(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n") == b""
        for _, writer in held:
            writer.transport.abort()


# -- TLS --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    return self_signed(tmp_path_factory.mktemp("tls"))


def self_signed(folder: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


async def test_tls_on_both_sides(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(cert, key)
    trust = ssl.create_default_context(cafile=str(cert))
    async with world(pods=[FakePod(hello_stream, ssl_context=server)], front_ssl=server, pods_ssl=trust) as w:
        body = {"model": "m", "stream": True}
        for _ in range(2):
            reply = await w.session.post(f"{w.url}/v1/chat/completions", json=body, ssl=trust)
            assert (await reply.read()).endswith(b"[DONE]\n\n")
        assert w.pod.requests[0].header("x-forwarded-proto") == "https"
        assert w.pod.connections == 1


async def test_a_certificate_that_is_renewed_is_served_without_a_restart(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = self_signed(tmp_path)
    settings = read(ServeSettings, {"tls_cert": str(cert), "tls_key": str(key)})
    context = server_tls(settings)
    assert context is not None

    def served(port: int) -> str:
        return ssl.get_server_certificate(("127.0.0.1", port), timeout=5)

    task = asyncio.create_task(renewed(context, settings, look_s=0.02))
    async with world(front_ssl=context) as w:
        first = await asyncio.to_thread(served, w.port)
        shutil.copy(certificate[0], cert)  # the key is another's until it is written too
        await asyncio.sleep(0.2)
        assert await asyncio.to_thread(served, w.port) == first
        shutil.copy(certificate[1], key)
        await eventually_async(lambda: _is(asyncio.to_thread(served, w.port), certificate[0].read_text()))
        cert.unlink()
        await asyncio.sleep(0.1)
        assert not task.done()
    task.cancel()


async def _is(found: Awaitable[str], wanted: str) -> bool:
    return await found == wanted


async def test_a_pod_with_a_certificate_nobody_signed_gets_nothing(certificate: tuple[Path, Path]) -> None:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(*certificate)
    async with world(pods=[FakePod(echo, ssl_context=server)]) as w:
        assert (await w.chat()).status == 503
        assert w.bodies() == 0
        assert w.fleet.failures["connect"] == 1


# -- shutdown ---------------------------------------------------------------------------------------------------


async def slow_stream(served: Served) -> None:
    await served.begin_stream()
    for n in range(20):
        await served.event({"n": n})
        await asyncio.sleep(0.05)
    await served.event("[DONE]")
    await served.end()


async def test_h69_at_sigterm_unready_first_then_streams_end_then_the_port_closes() -> None:
    async with world(slow_stream) as w:
        reply = await w.chat(stream=True)
        await reply.content.readany()
        stopping = asyncio.create_task(drain(w.app, w.listener, w.lifecycle, delay_s=0.2, grace_s=20))
        await asyncio.sleep(0.05)
        ready = await w.session.get(f"{w.url}/ready?scope=self")
        assert ready.status == 503
        assert json.loads(await ready.read())["reasons"] == ["draining"]
        assert ready.headers["Connection"] == "close"  # the last on its connection
        late = await w.chat(stream=True)  # a load balancer that has not looked yet
        assert late.status == 200
        assert (await reply.read()).endswith(b"[DONE]\n\n")
        assert (await late.read()).endswith(b"[DONE]\n\n")
        assert await stopping
        with pytest.raises(aiohttp.ClientConnectionError):
            await w.session.get(f"{w.url}/health")


async def test_h69_streams_that_outlast_the_grace_end_visibly() -> None:
    async def endless(served: Served) -> None:
        await served.begin_stream()
        await served.event({"n": 1})
        await served.wait_closed_by_peer()

    async with world(endless) as w:
        waiting = asyncio.create_task(
            w.raw(b'POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 13\r\n\r\n{"model":"m"}')
        )
        await eventually(lambda: w.bodies() == 1)
        await asyncio.sleep(0.1)
        assert not await drain(w.app, w.listener, w.lifecycle, delay_s=0, grace_s=0.2)
        got = await waiting
        assert b"shutting down" in got
        assert not got.endswith(b"0\r\n\r\n")
        assert w.inflight == 0
        await eventually(lambda: not w.pod.open)


async def test_h69_a_request_before_its_first_byte_gets_a_503_at_the_end_of_the_grace() -> None:
    async def silent(served: Served) -> None:
        await served.wait_closed_by_peer()

    async with world(silent) as w:
        waiting = asyncio.create_task(w.chat())
        await eventually(lambda: w.bodies() == 1)
        await drain(w.app, w.listener, w.lifecycle, delay_s=0, grace_s=0.2)
        reply = await waiting
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")


async def test_h69_an_idle_router_stops_after_the_delay_and_drops_idle_connections() -> None:
    async with world() as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
        await eventually(lambda: w.metrics.value("warmroute_client_connections") == 1)
        assert await asyncio.wait_for(drain(w.app, w.listener, w.lifecycle, delay_s=0.1, grace_s=30), 15)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()


# -- liveness ---------------------------------------------------------------------------------------------------


async def health_seconds(w: World, count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        assert (await w.session.get(f"{w.url}/health")).status == 200
        seconds.append(time.perf_counter() - began)
        await asyncio.sleep(0.02)
    return sorted(seconds)


async def many_streams(w: World, count: int) -> list[aiohttp.ClientResponse]:
    replies = []
    for _ in range(0, count, 100):
        replies += await asyncio.gather(*(w.chat(stream=True) for _ in range(min(100, count))))
    return replies


async def trickle(served: Served) -> None:
    await served.begin_stream()
    with contextlib.suppress(ConnectionError):
        while not served.reader.at_eof():
            await served.event({"n": 1})
            await asyncio.sleep(2)
    served.close()


async def test_h70_health_answers_while_streams_are_open() -> None:
    async with world(trickle) as w:
        replies = await many_streams(w, 200)
        await health_seconds(w, 10)
        assert w.inflight == 200
        for reply in replies:
            reply.close()
        await eventually(lambda: w.inflight == 0)
