"""The chaos run: `python -m tests.chaos.run --seconds 600` prints what came of every request; exit 1 if it is wrong.

A router process before emulated pods that refuse, break, freeze and are killed, with Redis stopped and continued, and
clients that leave at any byte. Every request must end in one of: served whole, visibly broken, refused with a reason,
or left by its client. Nothing may end cleanly and be incomplete; nothing may run twice beyond the counted ambiguous
retries; at the end nothing may be left open, booked or grown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.chaos.pod import text_of
from tests.fakes.proxy_world import free_port

PODS = 4
CLIENTS = 24


@dataclass
class Ledger:
    """What came of every request."""

    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)


class Chaos:
    def __init__(self, folder: Path, *, seed: int, seconds: float, redis: bool) -> None:
        self.folder = folder
        self.rng = random.Random(seed)
        self.seconds = seconds
        self.ports = [free_port() for _ in range(PODS)]
        self.runs_file = folder / "runs"
        self.log_file = folder / "router.log"
        self.pods: list[asyncio.subprocess.Process] = []
        self.redis_port = free_port() if redis and shutil.which("redis-server") else 0
        self.redis: asyncio.subprocess.Process | None = None
        self.router: asyncio.subprocess.Process | None = None
        self.ledger = Ledger()
        self.url = self.admin = ""
        self.rss: list[int] = []

    # -- processes ------------------------------------------------------------------------------------------------

    async def start_pod(self, n: int) -> asyncio.subprocess.Process:
        arguments = [
            "-m",
            "tests.chaos.pod",
            str(self.ports[n]),
            f"pod{n}",
            str(self.runs_file),
            str(self.rng.random())[2:],
        ]
        return await asyncio.create_subprocess_exec(sys.executable, *arguments)

    async def start(self) -> None:
        self.pods = [await self.start_pod(n) for n in range(PODS)]
        flags = ["--drain-delay-s", "0", "--idle-limit-s", "3", "--first-byte-limit-s", "5", "--retry-reserve", "50"]
        if self.redis_port:
            self.redis = await asyncio.create_subprocess_exec(
                "redis-server", "--port", str(self.redis_port), "--save", "", "--bind", "127.0.0.1",
                stdout=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            flags += ["--redis-url", f"redis://127.0.0.1:{self.redis_port}"]
        for port in self.ports:
            flags += ["--pod", f"http://127.0.0.1:{port},model=m"]
        with self.log_file.open("wb") as log:
            self.router = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "router", "--host", "127.0.0.1", "--port", "0", "--admin-port", "0", *flags,
                stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        ports: dict[str, int] = {}
        deadline_s = time.monotonic() + 60
        while len(ports) < 2:
            assert time.monotonic() < deadline_s, self.log_file.read_text()
            await asyncio.sleep(0.1)
            for line in self.log_file.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    row = json.loads(line)
                    if row.get("message") == "listening":
                        ports[row["what"]] = row["port"]
        self.url, self.admin = (f"http://127.0.0.1:{ports[w]}" for w in ("client", "admin"))

    async def stop(self) -> None:
        for process in [*self.pods, self.redis, self.router]:
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
                    process.kill()
                await process.wait()

    def router_rss_bytes(self) -> int:
        assert self.router is not None
        return int(Path(f"/proc/{self.router.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    # -- what goes wrong ------------------------------------------------------------------------------------------

    async def break_things(self, until_s: float) -> None:
        """One fault of a process at a time, healed before the next: some pod always lives."""
        while time.monotonic() < until_s:
            await asyncio.sleep(self.rng.uniform(0.5, 3.0))
            n = self.rng.randrange(PODS)
            match self.rng.choice(["kill", "kill", "freeze", "redis"]):
                case "kill":
                    self.ledger.events["pod killed"] += 1
                    self.pods[n].kill()
                    await self.pods[n].wait()
                    await asyncio.sleep(self.rng.uniform(0, 1.5))
                    self.pods[n] = await self.start_pod(n)
                case "freeze":
                    self.ledger.events["pod frozen"] += 1
                    self.pods[n].send_signal(signal.SIGSTOP)
                    await asyncio.sleep(self.rng.uniform(0.2, 4.0))
                    self.pods[n].send_signal(signal.SIGCONT)
                case "redis" if self.redis is not None:
                    self.ledger.events["redis stopped"] += 1
                    self.redis.send_signal(signal.SIGSTOP)
                    await asyncio.sleep(self.rng.uniform(0.2, 3.0))
                    self.redis.send_signal(signal.SIGCONT)

    # -- clients --------------------------------------------------------------------------------------------------

    async def client(self, number: int, until_s: float) -> None:
        rng = random.Random(self.rng.random() + number)
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < until_s:
                chaos_id = f"{rng.getrandbits(64):016x}"
                if rng.random() < 0.12:
                    outcome = await self.abort_somewhere(rng, chaos_id)
                else:
                    outcome = await self.ask(session, chaos_id, stream=rng.random() < 0.7)
                self.ledger.outcomes[outcome] += 1
                await asyncio.sleep(rng.random() * 0.05)

    async def ask(self, session: aiohttp.ClientSession, chaos_id: str, *, stream: bool) -> str:
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": chaos_id}],
            "chaos_id": chaos_id,
            "stream": stream,
        }
        text = "".join(text_of(chaos_id))
        try:
            async with session.post(f"{self.url}/v1/chat/completions", json=body) as reply:
                status, raw = reply.status, await reply.read()
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as exc:
            if isinstance(exc, aiohttp.ClientPayloadError):
                return "visibly broken"
            self.ledger.wrong.append(f"{chaos_id}: the router itself broke off before a reply ({type(exc).__name__})")
            return "wrong"
        if status != 200:
            return self.refused(chaos_id, status, raw)
        if b'"error"' in raw:
            return "visibly broken"
        got, ended = self.content(raw, stream)
        if got == text and ended:
            return "served"
        self.ledger.wrong.append(f"{chaos_id}: clean end, {len(got)} of {len(text)} characters, [DONE] {ended}")
        return "wrong"

    def refused(self, chaos_id: str, status: int, raw: bytes) -> str:
        try:
            message = json.loads(raw)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            self.ledger.wrong.append(f"{chaos_id}: {status} without a reason")
            return "wrong"
        self.ledger.refusals[f"{status} {message}"] += 1
        return "refused with a reason"

    @staticmethod
    def content(raw: bytes, stream: bool) -> tuple[str, bool]:
        if not stream:
            return json.loads(raw)["choices"][0]["message"]["content"], True
        events = [e.removeprefix("data: ") for e in raw.decode().split("\n\n") if e]
        words = [json.loads(e)["choices"][0]["delta"]["content"] for e in events if e != "[DONE]"]
        return "".join(words), events[-1:] == ["[DONE]"]

    async def abort_somewhere(self, rng: random.Random, chaos_id: str) -> str:
        """Leave at a random byte of the request or of the reply."""
        host, port = self.url.removeprefix("http://").split(":")
        body = json.dumps({"model": "m", "chaos_id": chaos_id, "messages": [], "stream": True}).encode()
        data = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        reader, writer = await asyncio.open_connection(host, int(port))
        cut = rng.randrange(len(data) * 2)
        writer.write(data[:cut])
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(rng.random() * 0.3):
                await reader.read(rng.randrange(1, 3000))
        if rng.random() < 0.5:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        writer.transport.abort()
        return "left by its client"

    # -- the run --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        until_s = time.monotonic() + self.seconds
        tasks = [asyncio.create_task(self.client(n, until_s)) for n in range(CLIENTS)]
        tasks.append(asyncio.create_task(self.break_things(until_s)))
        tasks.append(asyncio.create_task(self.watch_memory(until_s)))
        await asyncio.gather(*tasks)

    async def watch_memory(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            await asyncio.sleep(min(5.0, self.seconds / 10))
            self.rss.append(self.router_rss_bytes())

    async def metric(self, session: aiohttp.ClientSession, name: str) -> float:
        async with session.get(f"{self.url}/metrics") as reply:
            text = await reply.text()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name
        )

    async def at_rest(self) -> dict[str, object]:
        """What the router says once nobody asks any more; waits for it to come to rest."""
        deadline_s = time.monotonic() + 30
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            while True:
                async with session.get(f"{self.admin}/debug/pods") as reply:
                    pods = (await reply.json())["pods"]
                workers = [w for p in pods for w in p["workers"]]
                state = {
                    "bookings": sum(w["inflight_requests"] for w in workers),
                    "booked prefill tokens": sum(w["booked_prefill_tokens"] for w in workers),
                    "connections to pods": await self.metric(session, "warmroute_pod_connections"),
                    "requests in flight": await self.metric(session, "warmroute_inflight_requests") - 1,  # this one
                }
                if not any(state.values()) or time.monotonic() > deadline_s:
                    break
                await asyncio.sleep(0.5)
            state["ambiguous retries"] = await self.metric(session, "warmroute_ambiguous_retries_total")
            state["retries"] = await self.metric(session, "warmroute_retries_total")
        return state

    def verdict(self, state: dict[str, object]) -> list[str]:
        """What does not add up."""
        problems = list(self.ledger.wrong[:10])
        runs = Counter(self.runs_file.read_text().split()) if self.runs_file.exists() else Counter()
        doubles = sum(n - 1 for n in runs.values() if n > 1)
        state["runs"], state["double runs"] = sum(runs.values()), doubles
        if doubles > float(str(state["ambiguous retries"])):
            problems.append(f"{doubles} double runs, {state['ambiguous retries']} ambiguous retries")
        rest = ("bookings", "booked prefill tokens", "connections to pods", "requests in flight")
        problems += [f"{name} at rest: {state[name]}" for name in rest if state[name]]
        if "Traceback" in self.log_file.read_text(errors="replace"):
            problems.append(f"a traceback in {self.log_file}")
        if not self.ledger.outcomes["served"]:
            problems.append("nothing was served")
        early, late = self.rss[len(self.rss) // 4], max(self.rss[-3:])
        state["RSS MB"] = f"{early >> 20} -> {late >> 20}"
        if late > early * 1.25 + (16 << 20):
            problems.append(f"RSS grew: {state['RSS MB']} MB")
        return problems


async def chaos(*, seconds: float, seed: int, redis: bool = True) -> tuple[Chaos, dict[str, object], list[str]]:
    """Run it; the run, the state at rest, and what does not add up."""
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        run = Chaos(Path(folder), seed=seed, seconds=seconds, redis=redis)
        try:
            await run.start()
            await asyncio.sleep(1.5)
            await run.run()
            state = await run.at_rest()
            return run, state, run.verdict(state)
        finally:
            await run.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    run, state, problems = asyncio.run(chaos(seconds=arguments.seconds, seed=arguments.seed))
    print(f"chaos, {arguments.seconds:g} s, seed {arguments.seed}, {sum(run.ledger.outcomes.values())} requests")
    for title, counts in (
        ("outcomes", run.ledger.outcomes),
        ("refusals", run.ledger.refusals),
        ("faults", run.ledger.events),
    ):
        print(f"{title}:")
        for name, count in counts.most_common():
            print(f"  {count:7}  {name}")
    print("at rest:")
    for name, value in state.items():
        print(f"  {value!s:>9}  {name}")
    print("\n".join(f"PROBLEM {p}" for p in problems) or "everything adds up")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
