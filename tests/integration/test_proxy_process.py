"""The whole router as a process before fake pods: what only shows there (H58, H69, H71, exit status, no traceback)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.fakes.fake_pod import FakePod, Served, echo
from tests.fakes.proxy_world import eventually, eventually_async


@dataclass
class Process:
    """`warmroute serve` with its log."""

    process: asyncio.subprocess.Process
    session: aiohttp.ClientSession
    lines: list[dict] = field(default_factory=list)
    url: str = ""
    admin: str = ""

    def log(self) -> str:
        return "\n".join(json.dumps(line) for line in self.lines)


@contextlib.asynccontextmanager
async def serve(*pods: FakePod, flags: tuple[str, ...] = ()) -> AsyncIterator[Process]:
    """Run it on free ports until the block ends."""
    arguments = ["-m", "router", "--host", "127.0.0.1", "--port", "0", "--admin-port", "0", *flags]
    for pod in pods:
        arguments += ["--pod", f"{pod.url},model=m"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stderr=asyncio.subprocess.PIPE, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        running = Process(process, session)
        reading = asyncio.create_task(_read(process, running.lines))
        try:
            await eventually(lambda: len(_ports(running)) == 2 or process.returncode is not None, within_s=60)
            assert process.returncode is None, running.log()
            ports = _ports(running)
            running.url, running.admin = (f"http://127.0.0.1:{ports[w]}" for w in ("client", "admin"))
            yield running
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await reading


def _ports(running: Process) -> dict[str, int]:
    return {line["what"]: line["port"] for line in running.lines if line.get("message") == "listening"}


async def _read(process: asyncio.subprocess.Process, lines: list[dict]) -> None:
    assert process.stderr is not None
    async for raw in process.stderr:
        try:
            lines.append(json.loads(raw))
        except ValueError:
            lines.append({"message": raw.decode(errors="replace"), "level": "error"})


async def ready(running: Process, pods: int) -> None:
    async def check() -> bool:
        async with running.session.get(f"{running.url}/ready") as reply:
            return (await reply.json())["pods_ready"] == pods

    await eventually_async(check, within_s=30)


async def chat(running: Process, **fields: object) -> aiohttp.ClientResponse:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return await running.session.post(f"{running.url}/v1/chat/completions", json=body)


async def test_h58_a_hundred_at_once_spread_over_idle_pods() -> None:
    go = asyncio.Event()

    async def script(served: Served) -> None:
        await go.wait()
        await echo(served)

    pods = [FakePod(script, name=f"pod{n}") for n in range(4)]  # their /metrics stay silent for ever
    async with contextlib.AsyncExitStack() as stack:
        for pod in pods:
            await stack.enter_async_context(pod)
        running = await stack.enter_async_context(serve(*pods))
        await ready(running, 4)
        waiting = [asyncio.create_task(chat(running, n=n)) for n in range(100)]
        await eventually(lambda: sum(len(p.requests) for p in pods) == 100, within_s=60)
        counts = [len(p.requests) for p in pods]
        go.set()
        assert {(await w).status for w in waiting} == {200}
        assert all(20 <= n <= 30 for n in counts), counts


async def test_h69_h71_sigterm_with_an_open_stream_loses_nothing() -> None:
    async def script(served: Served) -> None:
        await served.begin_stream()
        for n in range(15):
            await served.event({"n": n})
            await asyncio.sleep(0.1)
        await served.event("[DONE]")
        await served.end()

    async with FakePod(script) as pod, serve(pod, flags=("--drain-delay-s", "0.2")) as running:
        async with running.session.get(f"{running.url}/health") as reply:
            assert reply.status == 200  # live with no Redis, no events, no tokenizer
        await ready(running, 1)
        stream = await chat(running, stream=True)
        await stream.content.readany()
        running.process.send_signal(signal.SIGTERM)

        async def unready() -> bool:
            async with running.session.get(f"{running.url}/ready?scope=self") as reply:
                return reply.status == 503

        await eventually_async(unready)
        assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(running.process.wait(), 30) == 0
    assert "traceback" not in running.log()
    assert not [line for line in running.lines if line.get("level") == "error"]


async def test_sigterm_serves_those_that_wait_for_room_too() -> None:
    go = asyncio.Event()

    async def script(served: Served) -> None:
        await go.wait()
        await echo(served)

    flags = ("--overload-prefill-s", "0.01", "--prefill-tokens-per-s", "100", "--drain-delay-s", "0.2")
    async with FakePod(script) as pod, serve(pod, flags=flags) as running:
        await ready(running, 1)
        asked = [asyncio.create_task(chat(running, n=n, stream=True)) for n in range(3)]

        async def two_wait() -> bool:
            async with running.session.get(f"{running.admin}/debug/pods") as reply:
                return (await reply.json())["waiting"]["requests"] == 2

        await eventually_async(two_wait, within_s=30)
        assert len(pod.requests) == 1
        running.process.send_signal(signal.SIGTERM)
        await eventually(lambda: any(line.get("message") == "draining" for line in running.lines))
        go.set()
        assert [(await reply).status for reply in asked] == [200, 200, 200]
        for reply in asked:
            await reply.result().read()
        assert await asyncio.wait_for(running.process.wait(), 30) == 0
    assert "traceback" not in running.log()


async def test_an_empty_fleet_is_live_and_answers_503() -> None:
    dead = FakePod()
    await dead.start()
    await dead.stop()
    async with serve(dead) as running:
        async with running.session.get(f"{running.url}/ready?scope=self") as reply:
            assert reply.status == 200
        async with running.session.get(f"{running.url}/ready") as reply:
            assert reply.status == 503
        reply = await chat(running)
        assert (reply.status, "Retry-After" in reply.headers) == (503, True)
        async with running.session.get(f"{running.admin}/metrics") as reply:
            assert 'warmroute_pods{state="ready"} 0.0' in await reply.text()  # H73


async def test_ready_waits_for_a_tokenizer_that_was_asked_for_and_not_for_one_that_fails() -> None:
    tiny = Path(__file__).parents[1] / "data" / "tiny-model"
    async with FakePod(echo) as pod:
        async with serve(pod, flags=("--tokenizer", f"m={tiny}", "--decision-headers")) as running:
            reasons: set[str] = set()
            await eventually_async(lambda: _ready(running, reasons), within_s=60)
            assert reasons <= {"no_pod_ready", "tokenizer_loading"}
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            async with running.session.post(running.url + "/v1/chat/completions", json=body) as reply:
                assert int(reply.headers["x-warmroute-prompt-tokens"]) > 0
        async with serve(pod, flags=("--tokenizer", f"m={tiny}/nothing-here")) as running:
            await eventually_async(lambda: _ready(running, set()), within_s=60)


async def _ready(running: Process, reasons: set[str]) -> bool:
    async with running.session.get(running.url + "/ready") as reply:
        reasons.update((await reply.json())["reasons"])
        return reply.status == 200
