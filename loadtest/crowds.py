"""One crowd or several client processes, with the same interface, and what they are doing right now.

May import: the standard library, the rooms of loadtest that a client needs.
"""

import asyncio
import itertools
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from loadtest import loop
from loadtest.crowd import Crowd, Live, Target
from loadtest.experiment import Experiment, faster
from loadtest.prompts import Prompts, plain_words
from loadtest.samples import StageOutcome
from loadtest.workload import Session, Stage, Workload

LIVE_EVERY_S = 0.5
WORKER_LEAD_S = 1.0  # between telling the workers and the stage's begin


class ClientDied(Exception):
    """A client process is gone; its part of the load was not sent."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """All that a client process needs to make its part of the load by itself."""

    experiment: Experiment
    seed: int
    speed: float
    tokenizer: Path | None
    client_processes: int = 1

    def workload(self) -> Workload:
        return faster(self.experiment.build(self.seed), self.speed)


Watch = Callable[[Live], None]


class Crowds:
    """`begin` a target, then `run` its stages. Use as an async context manager."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._words = plain_words(recipe.tokenizer)
        self.workload = recipe.workload()
        self._workers: list[_Worker] = []
        self._crowd: Crowd | None = None

    async def __aenter__(self) -> "Crowds":
        if self._recipe.client_processes > 1:
            count = self._recipe.client_processes
            self._workers = [_Worker(self._recipe, n, count) for n in range(count)]
            await asyncio.gather(*(w.ready() for w in self._workers))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._leave()
        for w in self._workers:
            w.stop()

    async def begin(self, target: Target, namespace: str) -> None:
        """From now on requests go there, with prompts of this namespace."""
        await self._leave()
        if self._workers:
            for w in self._workers:
                w.send("begin", target, namespace)
        else:
            self._crowd = await Crowd(target, Prompts(self._words, namespace=namespace)).__aenter__()

    async def run(self, index: int, watch: Watch) -> StageOutcome:
        """The stage of that number, to its end."""
        stage = self.workload.stages[index]
        if self._workers:
            begin_s = time.monotonic() + WORKER_LEAD_S
            parts = await asyncio.gather(*(w.run(index, begin_s, self._sum(watch)) for w in self._workers))
            out = parts[0]
            for part in parts[1:]:
                out.merge(part)
            return out
        assert self._crowd is not None
        self._crowd.live = Live()
        task = asyncio.create_task(self._crowd.run(stage, stage.sessions))
        while True:
            done, _ = await asyncio.wait({task}, timeout=LIVE_EVERY_S)
            watch(self._crowd.live)
            if done:
                return task.result()

    def _sum(self, watch: Watch) -> Callable[[], None]:
        def tell() -> None:
            total = Live()
            for w in self._workers:
                for name in ("sent", "in_flight", "done", "failed", "ttft_sum_s", "ttft_count"):
                    setattr(total, name, getattr(total, name) + getattr(w.live, name))
                total.last_failure = w.live.last_failure or total.last_failure
            watch(total)

        return tell

    async def _leave(self) -> None:
        if self._crowd is not None:
            await self._crowd.__aexit__()
            self._crowd = None


class _Worker:
    """The parent's end of one client process."""

    def __init__(self, recipe: Recipe, number: int, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_work, args=(theirs, recipe, number, count), daemon=True)
        self._process.start()
        theirs.close()
        self.live = Live()

    def send(self, *message: Any) -> None:
        self._pipe.send(message)

    async def ready(self) -> None:
        await self._receive()

    async def run(self, index: int, begin_s: float, tell: Callable[[], None]) -> StageOutcome:
        self.live = Live()
        self.send("run", index, begin_s)
        while True:
            message = await self._receive()
            if isinstance(message, StageOutcome):
                return message
            if isinstance(message, Exception):
                raise message
            self.live = message
            tell()

    def stop(self) -> None:
        self._pipe.close()
        self._process.join(timeout=5.0)
        if self._process.is_alive():
            self._process.kill()

    async def _receive(self) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(None, self._pipe.recv)
        except EOFError:
            self._process.join(timeout=5.0)
            raise ClientDied(f"a client process ended early, exit status {self._process.exitcode}") from None


def share(sessions: Sequence[Session], number: int, count: int) -> Sequence[Session]:
    """The part of a stage's sessions that client process `number` of `count` sends."""
    return sessions[number::count]


def _work(pipe: Connection, recipe: Recipe, number: int, count: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us, by closing the pipe
    loop.run(_worker(pipe, recipe, number, count))


async def _worker(pipe: Connection, recipe: Recipe, number: int, count: int) -> None:
    """A client process: does as it is told until the parent closes the pipe."""
    receive = asyncio.get_running_loop().run_in_executor
    words, workload = plain_words(recipe.tokenizer), recipe.workload()
    crowd: Crowd | None = None
    pipe.send("ready")
    try:
        while True:
            command, *args = await receive(None, pipe.recv)
            if command == "begin":
                if crowd is not None:
                    await crowd.__aexit__()
                crowd = await Crowd(args[0], Prompts(words, namespace=args[1])).__aenter__()
                continue
            assert crowd is not None
            index, begin_s = args
            stage = _part(workload.stages[index], number, count)
            crowd.live = Live()
            task = asyncio.create_task(crowd.run(stage, share(stage.sessions, number, count), begin_s=begin_s))
            for _ in itertools.count():
                done, _pending = await asyncio.wait({task}, timeout=LIVE_EVERY_S)
                pipe.send(crowd.live)
                if done:
                    break
            pipe.send(task.exception() or task.result())
    except EOFError:
        return
    finally:
        if crowd is not None:
            await crowd.__aexit__()


def _part(stage: Stage, number: int, count: int) -> Stage:
    """A closed loop's clients are shared out; an open loop's sessions are (see `share`)."""
    if not stage.concurrency:
        return stage
    mine = stage.concurrency // count + (1 if number < stage.concurrency % count else 0)
    return msgspec.structs.replace(stage, concurrency=max(mine, 1))
