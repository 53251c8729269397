"""`warmroute demo`: emulated pods, the real router before them, random against prefix routing. Nothing to install.

May import: the standard library, aiohttp, rich, the rooms of loadtest; the router only as a process of its own.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO, Any

import aiohttp
from rich.console import Console

from loadtest import report_text
from loadtest.compare import save, wide_console
from loadtest.crowds import Recipe
from loadtest.experiment import Experiment, ScenarioError, load_experiment
from loadtest.fleet.text import TINY_MODEL
from loadtest.live import Display
from loadtest.profile import load_profile
from loadtest.report import summaries
from loadtest.run import Arm, Plan, PlanError, execute
from loadtest.samples import Run

MODEL = "tiny"
PROFILE = "laptop-toy"
KV_BLOCKS = 1500  # of 16 tokens: 8 of the demo's 20 prefixes
READY_LIMIT_S = 90.0
LATE_LIMIT_MS = 250.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `warmroute demo`."""
    add = parser.add_argument
    add("--pods", type=int, default=4, help="emulated pods (4)")
    add("--policies", default="random,prefix", help="what to compare, the first is the base (random,prefix)")
    add("--rate", type=float, help="requests/s instead of the scenario's")
    add("--seconds", type=float, help="seconds an arm, warm-up included, instead of the scenario's")
    add("--seed", type=int, default=1, help="seed of arrivals and prompts (1)")
    add("--out", type=Path, help="write OUT.json, OUT.csv and OUT.html")
    add("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    """The whole demonstration. Returns the exit status."""
    console = wide_console()
    changes = {k: v for k, v in (("rate", args.rate), ("seconds", args.seconds)) if v is not None}
    try:
        if args.pods < 1:
            raise PlanError("--pods must be at least 1; two or more, to have something to choose")
        experiment = load_experiment("demo", changes)
        console.print(_what(experiment, args.pods), highlight=False, markup=False)
        done = asyncio.run(_demo(args, experiment, console))
    except (PlanError, ScenarioError) as exc:
        print(f"demo: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    console.print(report_text.render(done))
    if args.out is not None:
        for path in save(done, args.out):
            console.print(f"wrote {path}", highlight=False, markup=False)
    return 0 if all(not a.pooled.failed and a.pooled.requests for a in summaries(done)) else 1


async def _demo(args: argparse.Namespace, experiment: Experiment, console: Console) -> Run:
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="warmroute-demo-") as logs:
        async with _fleet(args.pods, Path(logs)) as pods, _router(pods, Path(logs)) as url:
            plan = Plan(
                arms=[Arm(p, (url,), p) for p in args.policies.split(",") if p],
                recipe=Recipe(experiment=experiment, seed=args.seed, speed=1.0, tokenizer=TINY_MODEL),
                model=MODEL,
                pods=[p["url"] for p in pods],
                late_limit_s=LATE_LIMIT_MS / 1000,
                command="warmroute demo",
            )
            with Display(console, quiet=args.quiet) as display:
                done = await execute(plan, display.show)
    console.print(f"{time.monotonic() - began_s:.0f} s in all\n", highlight=False)
    return done


def _what(experiment: Experiment, pods: int) -> str:
    """What is about to be shown, and when it would not show."""
    w = experiment.workload[0]
    prefixes = w["groups"] * w["prefix_tokens"]
    pod = KV_BLOCKS * load_profile(PROFILE).block_size_tokens
    return (
        f"{pods} EMULATED pods (no GPU, no model) behind a real warmroute. {experiment.about}.\n"
        f"The prefixes together ({prefixes:,} tokens) overflow one pod's KV cache ({pod:,}) and fit the fleet's "
        f"({pods * pod:,}):\nthat is where routing by prefix pays. If they fitted one pod, or were all different, "
        "there would be nothing to win."
    )


@contextlib.asynccontextmanager
async def _fleet(pods: int, logs: Path) -> AsyncIterator[list[dict[str, Any]]]:
    """Emulated pods in a process of their own."""
    flags = ["--pods", str(pods), "--port-base", "0", "--profile", PROFILE, "--kv-blocks", str(KV_BLOCKS)]
    flags += ["--model", MODEL, "--stream-interval", "4", "--json", "--until-eof"]
    with _process(["-m", "loadtest", "fleet", *flags], logs / "fleet.log", stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        line = await asyncio.to_thread(child.stdout.readline)
        if not line:
            raise PlanError(f"the emulated pods did not start:\n{_tail(logs / 'fleet.log')}")
        yield json.loads(line)["pods"]


@contextlib.asynccontextmanager
async def _router(pods: Sequence[dict[str, Any]], logs: Path) -> AsyncIterator[str]:
    """`warmroute serve` before them, ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--host", "127.0.0.1", "--port", str(port), "--admin-port", "0", "--policy", "prefix"]
    flags += ["--allow-policy-header", "--decision-headers", "--log-level", "warning"]
    flags += [x for p in pods for x in ("--pod", p["spec"])]
    flags += ["--tokenizer", f"{MODEL}={TINY_MODEL}"]
    url = f"http://127.0.0.1:{port}"
    with _process(["-m", "router", *flags], logs / "router.log") as child:
        await _ready(url, child, logs / "router.log")
        yield url


async def _ready(url: str, child: "subprocess.Popen[str]", log: Path) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as http:
        limit_s = time.monotonic() + READY_LIMIT_S
        while time.monotonic() < limit_s and child.poll() is None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with http.get(url + "/ready") as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise PlanError(f"the router was not ready within {READY_LIMIT_S:.0f} s:\n{_tail(log)}")


@contextlib.contextmanager
def _process(arguments: Sequence[str], log: Path, stdout: int | None = None) -> Any:
    """A child Python whose standard error goes to a file; ended when the block is left."""
    # the child finds the packages where we found them, also when they are not installed
    root = str(Path(__file__).resolve().parent.parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)}
    with log.open("w") as errors:
        child = subprocess.Popen(  # noqa: S603  ourselves
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=errors if stdout is None else stdout,
            stderr=errors,
            text=True,
            env=env,
        )
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            for pipe in (child.stdin, child.stdout):
                _close(pipe)


def _close(pipe: IO[str] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(OSError):
            pipe.close()


def _tail(log: Path, characters: int = 2000) -> str:
    return log.read_text(errors="replace")[-characters:]
