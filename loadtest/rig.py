"""Emulated pods and the real router before them, as processes of their own: for demonstrations and checks.

May import: the standard library, aiohttp, msgspec, loadtest.fleet.text, loadtest.run; the router only as a process.
"""

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
import msgspec

from loadtest.fleet.text import TINY_MODEL
from loadtest.run import PlanError

MODEL = "tiny"
READY_LIMIT_S = 90.0


class Rig(msgspec.Struct, frozen=True):
    """What runs: the router's URL and the pods' own."""

    url: str
    pods: list[str]


@contextlib.asynccontextmanager
async def rig(pods: int, fleet_flags: Sequence[str]) -> AsyncIterator[Rig]:
    """So many pods of `loadtest fleet` behind a router that obeys x-warmroute-policy, ended with the block.

    Raises PlanError with the end of the log of what did not start.
    """
    with tempfile.TemporaryDirectory(prefix="warmroute-rig-") as logs:
        async with _fleet(pods, fleet_flags, Path(logs)) as fleet, _router(fleet, Path(logs)) as url:
            yield Rig(url, [p["url"] for p in fleet])


@contextlib.asynccontextmanager
async def _fleet(pods: int, more: Sequence[str], logs: Path) -> AsyncIterator[list[dict[str, Any]]]:
    """Emulated pods in a process of their own."""
    flags = ["--pods", str(pods), "--port-base", "0", "--model", MODEL, "--json", "--until-eof", *more]
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
