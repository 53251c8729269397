"""Start emulated pods: their listening sockets, restarts, and several of them in one or several processes.

May import: the standard library, aiohttp, loadtest.loop, the rooms of loadtest.fleet.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from loadtest import loop
from loadtest.fleet.http import build_app, reset_connection
from loadtest.fleet.pod import EmulatedPod, PodConfig
from loadtest.fleet.text import TINY_MODEL, ModelText
from loadtest.profile import load_profile


class RunningPod:
    """An emulated pod that listens. `spec` is what `warmroute serve --pod` takes."""

    def __init__(self, config: PodConfig, text: ModelText) -> None:
        self._want = config
        self._text = text
        self._runner: web.AppRunner | None = None
        self.pod: EmulatedPod
        self.port = config.port

    @property
    def url(self) -> str:
        host = f"[{self._want.host}]" if ":" in self._want.host else self._want.host
        return f"http://{host}:{self.port}"

    @property
    def spec(self) -> str:
        parts = [self.url]
        if self.pod.events_endpoint:
            parts.append(f"events={self.pod.events_endpoint}")
        if self.pod.replay_endpoint:
            parts.append(f"replay={self.pod.replay_endpoint}")
        return ",".join(parts)

    async def start(self) -> None:
        listening = self._bind()
        self.pod = EmulatedPod(msgspec.structs.replace(self._want, port=self.port), self._text)
        self.pod.start()
        await self._listen(listening)

    async def stop(self, *, freeze: bool = False) -> None:
        """End this life. `freeze`: as vLLM on SIGTERM, open streams get neither data nor an end."""
        await self._close(freeze=freeze)
        await self.pod.stop()

    async def clients_left(self) -> None:
        """Until the last client of a frozen pod has given up."""
        while self.pod.open_requests:  # noqa: ASYNC110  a poll in a process that only waits to end
            await asyncio.sleep(0.05)

    async def restart(self, *, down_s: float = 0.0) -> None:
        """A new process on the same ports after `down_s` without anybody listening; open connections are reset."""
        await self.stop()
        await asyncio.sleep(down_s)
        self.pod.restart()
        await self._listen(self._bind())

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._want.host else socket.AF_INET
        listening = socket.create_server((self._want.host, self.port), family=family, backlog=1024)
        self.port = listening.getsockname()[1]
        return listening

    async def _listen(self, listening: socket.socket) -> None:
        app = build_app(self.pod)
        app.router.add_post("/emulated/restart", self._restart_route)
        app.router.add_post("/emulated/sigterm", self._sigterm_route)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, keepalive_timeout=5.0, shutdown_timeout=0.1
        )
        await runner.setup()
        self._runner = runner
        await web.SockSite(runner, listening, backlog=1024).start()

    async def _close(self, *, freeze: bool) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        if freeze:
            for site in list(runner.sites):
                await site.stop()
            for connection in list(runner.server.connections) if runner.server is not None else ():
                if connection._current_request is None:  # as uvicorn: idle connections are closed, busy ones stay
                    connection.close()
                    if connection.transport is not None:
                        connection.transport.close()
            return
        if runner.server is not None:
            for connection in list(runner.server.connections):
                reset_connection(connection.transport)
        await runner.cleanup()

    async def _restart_route(self, request: web.Request) -> web.Response:
        down_s = float(request.query.get("down_s", "0"))
        self._soon = asyncio.create_task(self._later(self.restart(down_s=down_s)))
        return web.json_response({"restarting": True, "down_s": down_s})

    async def _sigterm_route(self, request: web.Request) -> web.Response:
        self._soon = asyncio.create_task(self._later(self.stop(freeze=True)))
        return web.json_response({"terminating": True})

    @staticmethod
    async def _later(what: Any) -> None:
        await asyncio.sleep(0.05)  # let the reply out first
        await what


@contextlib.asynccontextmanager
async def running_fleet(configs: Sequence[PodConfig], text: ModelText | None = None) -> AsyncIterator[list[RunningPod]]:
    """Emulated pods inside this process, stopped at the end."""
    text = text or ModelText()
    pods = [RunningPod(c, text) for c in configs]
    try:
        for p in pods:
            await p.start()
        yield pods
    finally:
        for p in pods:
            if hasattr(p, "pod"):
                await p.stop()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `warmroute loadtest fleet`."""
    add = parser.add_argument
    add("--pods", type=int, default=2, metavar="N", help="how many pods (2)")
    add("--profile", default="laptop-toy", help="name in loadtest/profiles or path of a .toml file (laptop-toy)")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port-base", type=int, default=8100, help="pod i listens on this + i; 0 = free ports (8100)")
    add("--events-port-base", type=int, help="KV events of pod i on this + i (port base + 1000)")
    add("--replay-port-base", type=int, help="replay of pod i on this + i (port base + 2000)")
    add("--no-events", action="store_true", help="publish no KV events")
    add("--event-form", choices=("map", "array"), default="map", help="map: vLLM >= 0.24; array: before (map)")
    add("--model", default="tiny", help="served model name (tiny)")
    add("--lora", action="append", default=[], metavar="NAME", help="an adapter in /v1/models; repeatable")
    add("--max-loras", type=int, help="adapters on the GPU at a time; others wait (no limit, loading costs nothing)")
    add("--lora-load-s", type=float, default=0.5, help="seconds to load an adapter, with --max-loras (0.5)")
    add("--tokenizer", type=Path, default=TINY_MODEL, help="model directory with tokenizer.json and chat template")
    add("--speed", type=float, default=1.0, help="virtual seconds per second; below 1 is slower than real time (1)")
    add("--stream-interval", type=int, default=1, help="tokens per SSE chunk after the first (1)")
    add("--answer-tokens", type=int, default=128, help="length of an answer without max_tokens (128)")
    add("--kv-blocks", type=int, help="KV blocks of a pod instead of the profile's")
    add("--max-model-len", type=int, help="context length in tokens instead of the profile's")
    add("--seed", type=int, default=0, help="seed of the pods' jitter and faults (0)")
    add("--processes", type=int, default=1, help="spread the pods over this many processes (1)")
    add(
        "--sigterm", choices=("exit", "freeze"), default="exit", help="freeze: as vLLM, open streams stay silent (exit)"
    )
    add("--json", action="store_true", help="print one JSON line when every pod listens")
    add("--until-eof", action="store_true", help="end when standard input ends, so with the parent process")
    add("--first-pod", type=int, default=0, help=argparse.SUPPRESS)


def configs_from(args: argparse.Namespace) -> list[PodConfig]:
    """One PodConfig per pod. Raises FileNotFoundError and ValueError with the cure."""
    profile = load_profile(args.profile)
    changes: dict[str, float] = {}
    if args.kv_blocks:
        changes["num_blocks"] = args.kv_blocks
    if args.max_model_len:
        changes["max_model_len_tokens"] = args.max_model_len
    if args.max_loras:
        changes |= {"max_loras": args.max_loras, "lora_load_s": args.lora_load_s}
    if changes:
        profile = msgspec.structs.replace(profile, calibrated=False, **changes)
    if args.pods < 1 or args.processes < 1 or args.stream_interval < 1 or args.speed <= 0:
        raise ValueError("--pods, --processes and --stream-interval must be at least 1, --speed above 0")
    base = args.port_base
    events = args.events_port_base if args.events_port_base is not None else (base + 1000 if base else 0)
    replay = args.replay_port_base if args.replay_port_base is not None else (base + 2000 if base else 0)
    return [
        PodConfig(
            profile=profile,
            host=args.host,
            port=base + n if base else 0,
            events_port=None if args.no_events else (events + n if events else 0),
            replay_port=None if args.no_events else (replay + n if replay else 0),
            model=args.model,
            loras=tuple(args.lora),
            form=args.event_form,
            speed=args.speed,
            stream_interval_tokens=args.stream_interval,
            answer_tokens=args.answer_tokens,
            seed=args.seed + n,
        )
        for n in range(args.first_pod, args.first_pod + args.pods)
    ]


def run(args: argparse.Namespace) -> int:
    """`warmroute loadtest fleet`: run until SIGINT or SIGTERM."""
    try:
        configs = configs_from(args)
        if args.processes > 1 and args.pods > 1:
            return _run_children(args)
        text = ModelText(args.tokenizer)
    except (FileNotFoundError, ValueError) as exc:
        print(f"fleet: {exc}", file=sys.stderr)
        return 2
    return loop.run(_serve(args, configs, text))


async def _serve(args: argparse.Namespace, configs: Sequence[PodConfig], text: ModelText) -> int:
    stop = asyncio.Event()
    for sig in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sig, stop.set)
    if args.until_eof:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    try:
        async with running_fleet(configs, text) as pods:
            _print_ready(args, [describe(p) for p in pods])
            await stop.wait()
            if args.sigterm == "freeze":
                for p in pods:
                    await p.stop(freeze=True)
                await asyncio.gather(*(p.clients_left() for p in pods))
    except OSError as exc:  # zmq.ZMQError is one too
        print(f"fleet: cannot listen: {exc}; choose another --port-base, or 0 for free ports", file=sys.stderr)
        return 1
    return 0


def describe(p: RunningPod) -> dict[str, Any]:
    """What the parent, a script or a person needs to reach the pod."""
    return {"url": p.url, "events": p.pod.events_endpoint, "replay": p.pod.replay_endpoint, "spec": p.spec}


def _print_ready(args: argparse.Namespace, pods: list[dict[str, Any]]) -> None:
    if args.json:
        print(json.dumps({"pods": pods, "model": args.model, "tokenizer": str(args.tokenizer)}), flush=True)
        return
    print(f"{len(pods)} emulated pods, profile {args.profile}, model {args.model}, speed {args.speed:g}")
    for p in pods:
        print(f"--pod {p['spec']}")
    print(f"--tokenizer {args.model}={args.tokenizer}", flush=True)


def _run_children(args: argparse.Namespace) -> int:
    """One child process per share of the pods; the parent prints when all listen, and passes signals on."""
    count = min(args.processes, args.pods)
    shares = [args.pods // count + (1 if n < args.pods % count else 0) for n in range(count)]
    children: list[subprocess.Popen[str]] = []
    first = args.first_pod
    try:
        for share in shares:
            command = [sys.executable, "-m", "loadtest", "fleet", *_same_flags(args, pods=share, first=first)]
            children.append(_child(command))
            first += share
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, lambda *_: _terminate(children))
        pods: list[dict[str, Any]] = []
        for child in children:
            assert child.stdout is not None
            line = child.stdout.readline()
            if not line:
                return 1
            pods += json.loads(line)["pods"]
        _print_ready(args, pods)
        return max(child.wait() for child in children)
    finally:
        _terminate(children)
        for child in children:
            child.wait()


def _child(command: Sequence[str]) -> subprocess.Popen[str]:
    """A child that ends when its standard input does, so that it cannot outlive a parent that was killed."""
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603  ourselves


def _terminate(children: Sequence[subprocess.Popen[str]]) -> None:
    for child in children:
        child.terminate()


def _same_flags(args: argparse.Namespace, *, pods: int, first: int) -> list[str]:
    changed = {"pods": pods, "processes": 1, "first_pod": first, "json": True, "until_eof": True}
    flags: list[str] = []
    for name, value in (vars(args) | changed).items():
        if name in ("command", "run") or value is None or value is False:
            continue
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif isinstance(value, list):
            flags += [x for v in value for x in (flag, str(v))]
        else:
            flags += [flag, str(value)]
    return flags
