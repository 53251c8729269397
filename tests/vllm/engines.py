"""Real vLLM engines on the CPU, the real router and indexer, as child processes of a test."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
LOGS = ROOT / "out" / "vllm"
START_LIMIT_S = 420.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different."""
    held = []
    for _ in range(count):
        s = socket.socket()
        s.bind(("127.0.0.1", 0))
        held.append(s)
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports


def free_pair() -> int:
    """A port p such that p and p + 1 are free: PUB and replay ROUTER of one engine."""
    while True:
        (port,) = free_ports(1)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port + 1))
            return port


class Engine:
    """One vLLM with the tiny model: HTTP `url`, events and replay endpoints."""

    def __init__(self, name: str, *, blocks: int, extra: tuple[str, ...] = ()) -> None:
        self.name = name
        (self.port,) = free_ports(1)
        self.events_port = free_pair()
        self.url = f"http://127.0.0.1:{self.port}"
        self.spec = (
            f"{self.url},events=tcp://127.0.0.1:{self.events_port},replay=tcp://127.0.0.1:{self.events_port + 1}"
        )
        self._blocks = blocks
        self._extra = extra
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        # Elsewhere engines have GPUs of their own; here they must not keep router, indexer and Redis from the cores.
        argv = ["nice", "-n", "10", sys.executable, str(DATA / "serve_tiny.py"), "--python", str(VLLM_PYTHON)]
        argv += ["--port", str(self.port)]
        argv += ["--event-port", str(self.events_port), "--topic", f"kv@{self.name}@tiny"]
        argv += ["--num-blocks", str(self._blocks), "--", *self._extra]
        out = (LOGS / f"{self.name}.log").open("wb")
        self.process = subprocess.Popen(argv, stdout=out, stderr=out, start_new_session=True)

    def wait(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, f"engine {self.name} ended; see out/vllm/{self.name}.log"
            if asyncio.run(_status(self.url + "/health")) == 200:
                return
            time.sleep(1.0)
        raise TimeoutError(f"engine {self.name} was not up after {START_LIMIT_S} s")

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


async def _status(url: str) -> int:
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as s, s.get(url) as r:
            return r.status
    return 0


@contextlib.contextmanager
def running(engines: list[Engine]) -> Iterator[list[Engine]]:
    """All of them, started side by side, answering; killed at the end."""
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait()
        yield engines
    finally:
        for engine in engines:
            engine.kill()


@contextlib.contextmanager
def child(name: str, argv: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A warmroute process whose output goes to out/vllm/NAME.log; ended with SIGTERM, then SIGKILL."""
    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / f"{name}.log").open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, cwd=ROOT)
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


class Router:
    """`warmroute serve` before some pods."""

    def __init__(self, port: int, admin_port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.admin = f"http://127.0.0.1:{admin_port}"

    async def ready(self, pods: int, limit_s: float = 60.0) -> None:
        """Wait until `pods` pods are ready and their tokenizer is loaded."""
        deadline = time.monotonic() + limit_s
        shown: Any = None
        while time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with aiohttp.ClientSession() as s, s.get(self.admin + "/debug/pods") as r:
                    shown = await r.json()
                    rows = shown["pods"]
                    states = [m["state"] for m in shown["tokenizers"]["models"].values()]
                    if sum(p["ready"] for p in rows) == pods and states and all(x == "ready" for x in states):
                        return
            await asyncio.sleep(0.2)
        raise TimeoutError(f"the router was not ready after {limit_s} s: {json.dumps(shown)[:2000]}")


@contextlib.contextmanager
def router(engines: list[Engine], *extra: str, name: str = "router") -> Iterator[Router]:
    port, admin_port = free_ports(2)
    argv = [sys.executable, "-m", "router", "--host", "127.0.0.1", "--port", str(port), "--admin-port", str(admin_port)]
    for engine in engines:
        argv += ["--pod", engine.spec]
    argv += ["--tokenizer", f"tiny={DATA / 'tiny-model'}", "--decision-headers", "--allow-policy-header", *extra]
    with child(name, argv):
        yield Router(port, admin_port)


async def counters(engine: Engine) -> tuple[float, float]:
    """The engine's own prefix cache counters: tokens asked for, tokens hit."""
    async with aiohttp.ClientSession() as s, s.get(engine.url + "/metrics") as r:
        text = await r.text()
    found = {"queries": 0.0, "hits": 0.0}
    for line in text.splitlines():
        for what in found:
            if line.startswith(f"vllm:prefix_cache_{what}_total"):
                found[what] += float(line.rsplit(" ", 1)[1])
    return found["queries"], found["hits"]
