"""Many at once against a router process of its own: streams, aborts, clients that do not read. Slow lane."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.fake_pod import FakePod, Script, Served, echo, hello_stream
from tests.fakes.proxy_world import eventually_async
from tests.integration.test_proxy_process import Process, ready, serve

pytestmark = pytest.mark.slow
BODY = b'{"model":"m","stream":true,"prompt":"x"}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n" % len(BODY)


@contextlib.asynccontextmanager
async def fleet(script: Script, pods: int = 2) -> AsyncIterator[tuple[Process, list[FakePod]]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 20_000), hard), hard))
    async with contextlib.AsyncExitStack() as stack:
        made = [await stack.enter_async_context(FakePod(script)) for _ in range(pods)]
        running = await stack.enter_async_context(serve(*made))
        await ready(running, pods)
        yield running, made


def rss_mb(running: Process) -> float:
    pages = int(Path(f"/proc/{running.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def booked(running: Process) -> int:
    async with running.session.get(f"{running.admin}/debug/pods") as reply:
        workers = [w for p in (await reply.json())["pods"] for w in p["workers"]]
    return sum(w["inflight_requests"] + w["booked_prefill_tokens"] for w in workers)


async def at_rest(running: Process) -> None:
    async def none() -> bool:
        return await booked(running) == 0

    await eventually_async(none, within_s=60)


async def connect(running: Process, **limits: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = running.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port), **limits)


async def test_h70_proxy_load_2000_slow_streams_and_quick_health() -> None:
    async def script(served: Served) -> None:
        await served.begin_stream()
        with contextlib.suppress(ConnectionError):
            while not served.reader.at_eof():
                await served.event({"n": 1})
                await asyncio.sleep(4)
        served.close()

    async with fleet(script) as (running, pods):
        streams = []
        for _ in range(20):
            opened = await asyncio.gather(*(connect(running) for _ in range(100)))
            for reader, writer in opened:
                writer.write(HEAD + BODY)
                streams.append((reader, writer))
            await asyncio.gather(*(reader.readuntil(b"\n\n") for reader, _ in opened))
        assert sum(len(p.requests) for p in pods) == 2000
        seconds = []
        for _ in range(200):
            began = time.perf_counter()
            async with running.session.get(f"{running.url}/health") as reply:
                assert reply.status == 200
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(0.02)
        seconds.sort()
        p50_ms, p99_ms = seconds[100] * 1e3, seconds[197] * 1e3
        print(f"2,000 streams: /health p50 {p50_ms:.1f} ms, p99 {p99_ms:.1f} ms, RSS {rss_mb(running):.0f} MB")
        for _, writer in streams:
            writer.transport.abort()
        await at_rest(running)


async def test_proxy_load_10000_random_aborts_leave_no_booking() -> None:
    rng = random.Random(1)

    async def script(served: Served) -> None:
        with contextlib.suppress(ConnectionError):
            await asyncio.sleep(rng.random() * 0.03)
            await (hello_stream if rng.random() < 0.7 else echo)(served)

    async def abort(running: Process) -> None:
        reader, writer = await connect(running)
        writer.write((HEAD + BODY)[: rng.randrange(len(HEAD + BODY) * 2)])
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(rng.random() * 0.05):
                await reader.read(rng.randrange(1, 400))
        writer.transport.abort()

    async with fleet(script) as (running, pods):
        before = rss_mb(running)
        for _ in range(100):
            await asyncio.gather(*(abort(running) for _ in range(100)))
        await at_rest(running)
        async with running.session.post(f"{running.url}/v1/completions", data=BODY) as reply:
            assert reply.status == 200
        reached = sum(len(p.requests) for p in pods)
        print(f"10,000 aborts: {reached} reached a pod, RSS {before:.0f} -> {rss_mb(running):.0f} MB")
        assert not [line for line in running.lines if line.get("level") in ("warning", "error")]


async def test_proxy_load_4_clients_that_never_read() -> None:
    sent = 0

    async def script(served: Served) -> None:
        nonlocal sent
        if b"quick" in served.received.body:
            await hello_stream(served)
            return
        await served.begin_stream()
        with contextlib.suppress(ConnectionError):
            for _ in range(20_000):
                await served.chunk(b"x" * 16384)
                sent += 16384

    async with fleet(script) as (running, _):
        before = rss_mb(running)
        stuck = []
        for _ in range(4):
            reader, writer = await connect(running, limit=1024)
            writer.transport.pause_reading()
            writer.write(HEAD + BODY)
            stuck.append((reader, writer))
        await asyncio.sleep(5)
        async with asyncio.timeout(30):
            for _ in range(50):
                quick = json.dumps({"model": "m", "prompt": "quick", "stream": True}).encode()
                async with running.session.post(f"{running.url}/v1/completions", data=quick) as reply:
                    assert (await reply.read()).endswith(b"[DONE]\n\n")
        grown = rss_mb(running) - before
        print(f"4 clients that never read: pods wrote {sent >> 20} MB of 1,250, RSS + {grown:.1f} MB")
        assert sent < 200 << 20
        assert grown < 40
        for _, writer in stuck:
            writer.transport.abort()
        await at_rest(running)


async def test_proxy_load_slow_uploads_hold_no_pod() -> None:
    async with fleet(echo) as (running, pods):
        uploads = [await connect(running) for _ in range(200)]
        for _, writer in uploads:
            writer.write(HEAD + BODY[:5])
        await asyncio.sleep(1)
        assert sum(len(p.requests) + len(p.open) for p in pods) < 20
        for _, writer in uploads:
            writer.write(BODY[5:])
        for reader, writer in uploads:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.transport.abort()
        await at_rest(running)
