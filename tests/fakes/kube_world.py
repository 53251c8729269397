"""A small cluster in a box: emulated vLLM pods whose life is told to the API stand-in, a router process, and a crowd.

What a kubelet does is done here by hand, in its order: address and readiness after the start; at the end
deletionTimestamp, preStop, SIGTERM, and the object's removal.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from loadtest.fleet.faults import NO_FAULT, Fault
from loadtest.fleet.launch import RunningPod
from loadtest.fleet.pod import PodConfig
from loadtest.fleet.text import ModelText
from loadtest.profile import load_profile
from tests.fakes import kube_api as k
from tests.fakes.kube_api import Json, KubeApi

ROOT = Path(__file__).resolve().parents[2]
START = "import sys; from router.cli import main; sys.exit(main())"  # the console script


class VllmPod:
    """One pod: the emulated engine and its object in the API."""

    def __init__(self, api: KubeApi, name: str, text: ModelText, labels: dict[str, str]) -> None:
        self.name, self._api, self._text, self._labels = name, api, text, labels
        self.requests = 0
        self.engine = RunningPod(PodConfig(profile=load_profile("laptop-toy"), speed=4.0, answer_tokens=40), text)
        self.object: Json = {}

    async def start(self, fault: Fault = NO_FAULT) -> None:
        """Comes up: an object without address, then one that runs, then ready; with `fault` from the start."""
        self._put(ip=None, phase="Pending", ready=False)
        await self.engine.start()
        self.engine.pod.faults.set(fault)
        submit = self.engine.pod.submit

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.requests += 1
            return submit(*args, **kwargs)

        self.engine.pod.submit = counted  # type: ignore[method-assign]
        self._put(ready=False)
        self._put()

    @property
    def streaming(self) -> int:
        """Answers of which some tokens, but by far not all, are out."""
        return sum(5 < g.available < 100 for g in self.engine.pod._generations.values())

    async def terminate(self, *, pre_stop_s: float, drain_s: float) -> None:
        """Deleted as with the chart's flags: preStop, then a drain in which new requests get vLLM's 500."""
        self._put(deleting=True)
        await asyncio.sleep(pre_stop_s)
        self._put(deleting=True, ready=False)
        self.engine.pod.faults.set(Fault(kind="shutdown"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self.engine.pod.open_requests:
                    await asyncio.sleep(0.02)
        await self.engine.stop()
        self._api.delete(self.object)

    async def terminate_as_by_default(self) -> None:
        """Deleted with vLLM's own defaults: no preStop, and open streams freeze without an end."""
        self._put(deleting=True)
        await self.engine.stop(freeze=True)

    async def new_life(self, *, restarts: int = 0, uid: str | None = None, told: bool = True) -> None:
        """The engine starts anew on its old ports, in a restarted container or as another pod of the same name."""
        await self.engine.stop()
        if uid is not None:
            self._api.delete(self.object, told=told)
            self.object["metadata"]["uid"] = uid
        self.engine.pod.restart()
        await self.engine._listen(self.engine._bind())
        self._put(restarts=restarts)

    def evict(self) -> None:
        """Evicted by its node: Failed and without address, though its process may still answer for a while."""
        self._put(ip=None, phase="Failed", ready=False)

    async def stop(self) -> None:
        """The process alone."""
        if hasattr(self.engine, "pod"):
            await self.engine.stop()

    def _put(self, *, ip: str | None = "127.0.0.1", **changes: Any) -> None:
        annotations = {}
        if hasattr(self.engine, "pod"):
            ports = {
                "port": self.engine.url,
                "events-port": self.engine.pod.events_endpoint,
                "replay-port": self.engine.pod.replay_endpoint,
            }
            annotations = {f"warmroute.dev/{key}": url.rsplit(":", 1)[1] for key, url in ports.items() if url}
        uid = self.object["metadata"]["uid"] if self.object else None
        self.object = self._api.put(
            k.pod(self.name, ip, labels=self._labels, annotations=annotations, uid=uid, **changes)
        )


class Cluster:
    """The API stand-in and the pods behind it."""

    def __init__(self, api: KubeApi, labels: dict[str, str] | None = None) -> None:
        self.api, self.labels = api, labels or {"app": "vllm"}
        self.text = ModelText()
        self.pods: list[VllmPod] = []
        self._names = 0

    async def add(self) -> VllmPod:
        """One more pod, ready."""
        self._names += 1
        pod = VllmPod(self.api, f"vllm-{self._names}", self.text, self.labels)
        self.pods.append(pod)
        await pod.start()
        return pod

    async def stop(self) -> None:
        """All processes."""
        for pod in self.pods:
            await pod.stop()


class Process:
    """A `warmroute` process and the ports that it logged."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self._log = process, log
        self.ports: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['client']}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.ports['admin']}"

    @property
    def text(self) -> str:
        """What it has logged."""
        return self._log.read_text()

    async def listening(self, *wanted: str, within_s: float = 60.0) -> None:
        """Waits until it has logged these ports. Raises with its log if it ended."""
        async with asyncio.timeout(within_s):
            while not set(wanted) <= set(self.ports):
                if self._process.returncode is not None:
                    raise AssertionError(f"ended with {self._process.returncode}: {self.text}")
                for line in self.text.splitlines():
                    if line.startswith("{") and (fields := json.loads(line)).get("message") == "listening":
                        self.ports[fields["what"]] = fields["port"]
                await asyncio.sleep(0.05)

    async def stop(self) -> int:
        """SIGTERM, and its exit status."""
        if self._process.returncode is None:
            self._process.terminate()
        return await asyncio.wait_for(self._process.wait(), 60.0)


@asynccontextmanager
async def warmroute(args: Sequence[str], log: Path, **environ: str) -> AsyncIterator[Process]:
    """Runs `warmroute ARGS` until the block is left."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WARMROUTE_", "KUBE"))}
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", START, *args, cwd=ROOT, env={**clean, **environ}, stderr=sink
        )
    running = Process(process, log)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Crowd:
    """Clients that ask one chat after the other, and what became of each."""

    def __init__(self, url: str, *, model: str = "tiny", clients: int = 6, answer_tokens: int = 40) -> None:
        self._url, self._model, self._clients, self._answer_tokens = url, model, clients, answer_tokens
        self.whole = 0
        self.failed: list[str] = []  # refused or broken before the first byte
        self.broken: list[str] = []  # ended visibly in the middle
        self.silent: list[str] = []  # ended as if whole, or hung: what must never happen
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Crowd":
        self._task = asyncio.create_task(self._all())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def more(self, requests: int = 20, within_s: float = 30.0) -> None:
        """Waits until so many more have got their whole answer."""
        goal = self.whole + requests
        async with asyncio.timeout(within_s):
            while self.whole < goal:
                await asyncio.sleep(0.02)

    async def _all(self) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.TaskGroup() as g:
            for n in range(self._clients):
                g.create_task(self._one(session, n))

    async def _one(self, session: aiohttp.ClientSession, client: int) -> None:
        turn = 0
        while True:
            turn += 1
            await self.ask(session, f"client {client}, turn {turn}: " + "how do you keep a cache warm? " * 8)

    async def ask(self, session: aiohttp.ClientSession, text: str) -> None:
        """One streamed chat; its end is put into one of the four lists."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "max_tokens": self._answer_tokens,
        }
        began_s, received = time.monotonic(), b""
        try:
            limits = aiohttp.ClientTimeout(total=60.0)
            async with session.post(f"{self._url}/v1/chat/completions", json=body, timeout=limits) as reply:
                if reply.status != 200:
                    self.failed.append(f"{reply.status} {(await reply.text())[:200]}")
                    await asyncio.sleep(0.05)
                    return
                async for piece in reply.content.iter_any():
                    received += piece
        except TimeoutError:
            self.silent.append(f"hung for {time.monotonic() - began_s:.0f} s after {received[-80:]!r}")
            return
        except aiohttp.ClientError as exc:
            (self.broken if received else self.failed).append(type(exc).__name__)
            await asyncio.sleep(0.05)
            return
        if received.rstrip().endswith(b"data: [DONE]"):
            self.whole += 1
        elif b'"error"' in received.rsplit(b"data: ", 1)[-1]:
            self.broken.append("error event")
        else:
            self.silent.append(f"clean end after {received[-80:]!r}")
