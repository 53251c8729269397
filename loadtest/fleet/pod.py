"""One emulated pod in real time: the engine model on the wall clock, its answers and its KV events.

It publishes only what its own block pool did; it knows nothing of the router or its keys.
May import: the standard library, loadtest.engine, loadtest.profile, the rooms of loadtest.fleet.
"""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence

import msgspec

from loadtest.engine import Cleared, Engine, Gauges, Removed, StepResult, Stored, request_from_tokens
from loadtest.fleet.events import EventForm, EventPublisher
from loadtest.fleet.faults import FaultSwitch
from loadtest.fleet.text import ModelText
from loadtest.profile import Profile

TTFT_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class PodConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one emulated pod is. Ports 0 are free ones."""

    profile: Profile
    host: str = "127.0.0.1"
    port: int = 0
    events_port: int | None = 0  # None: the pod publishes nothing
    replay_port: int | None = 0
    model: str = "tiny"
    loras: tuple[str, ...] = ()
    form: EventForm = "map"
    speed: float = 1.0  # virtual seconds per second; below 1 is slower than real time
    stream_interval_tokens: int = 1  # tokens per SSE chunk after the first, as vLLM's --stream-interval
    answer_tokens: int = 128  # length of an answer that is not told when to stop
    buffer_batches: int = 10_000
    seed: int = 0


class Generation:
    """One sequence being generated; `available` tokens of `output_ids` may be sent."""

    __slots__ = ("_wake", "available", "cached_tokens", "due", "finished", "id", "output_ids", "submitted_s")

    def __init__(self, request_id: int, output_ids: Sequence[int], submitted_s: float) -> None:
        self.id = request_id
        self.output_ids = output_ids
        self.submitted_s = submitted_s
        self.cached_tokens = 0
        self.available = 0
        self.due = 1
        self.finished = False
        self._wake = asyncio.Event()

    def offer(self, available: int, *, finished: bool) -> None:
        self.available = available
        self.finished = finished
        self._wake.set()

    async def wait(self) -> None:
        """Until there is more than before."""
        await self._wake.wait()
        self._wake.clear()


class Life(msgspec.Struct):
    """What begins anew when a pod restarts."""

    engine: Engine
    publisher: EventPublisher | None
    started_unix_s: float


class EmulatedPod:
    """The engine loop. `start` needs a running loop; every Generation ends by itself or by `abort`."""

    def __init__(self, config: PodConfig, text: ModelText) -> None:
        self.config = config
        self.text = text
        self.faults = FaultSwitch(config.seed)
        self.open_requests = 0
        self._late_s = 0.0
        self.ttft_counts = [0] * (len(TTFT_BUCKETS_S) + 1)
        self.ttft_sum_s = 0.0
        self._ids = itertools.count(1)
        self._steps = 0
        self._generations: dict[int, Generation] = {}
        self._due: defaultdict[int, list[Generation]] = defaultdict(list)
        self._truth: dict[int, Stored] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._events_port, self._replay_port = config.events_port, config.replay_port
        self.life = self._new_life()

    def _new_life(self) -> Life:
        c = self.config
        publisher = None
        if self._events_port is not None:
            publisher = EventPublisher(
                endpoint=f"tcp://{c.host}:{self._events_port}",
                replay_endpoint=None if self._replay_port is None else f"tcp://{c.host}:{self._replay_port}",
                topic=f"kv@{c.host}:{c.port}@{c.model}",
                form=c.form,
                buffer_batches=c.buffer_batches,
            )
            self._events_port = _port(publisher.endpoint)
            self._replay_port = _port(publisher.replay_endpoint) if publisher.replay_endpoint else None
        return Life(Engine(c.profile, seed=c.seed), publisher, time.time())

    @property
    def events_endpoint(self) -> str | None:
        return None if self._events_port is None else f"tcp://{self.config.host}:{self._events_port}"

    @property
    def replay_endpoint(self) -> str | None:
        return None if self._replay_port is None else f"tcp://{self.config.host}:{self._replay_port}"

    def start(self) -> None:
        if self.life.publisher is not None:
            self.life.publisher.start()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """The process is gone: nothing more is generated or published; open generations stay silent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self.life.publisher is not None:
            self.life.publisher.close()
            self.life.publisher = None

    def restart(self) -> None:
        """A new process after `stop`: an empty cache, sequence numbers from 0, the same ports."""
        self._generations.clear()
        self._due.clear()
        self._truth.clear()
        self.life = self._new_life()
        self.start()

    def now_s(self) -> float:
        """The pod's clock: virtual seconds."""
        return time.monotonic() * self.config.speed

    def take_late_s(self) -> float:
        """How far the engine's clock fell behind the wall's at most since this was last asked (virtual seconds)."""
        late_s, self._late_s = self._late_s, 0.0
        return late_s

    def submit(
        self,
        prompt_ids: Sequence[int],
        output_tokens: int,
        *,
        seed: int,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        skip_cache_read: bool = False,
    ) -> Generation:
        """Hand a prompt to the engine. Raises ValueError when no pod of this profile could hold it."""
        request_id = next(self._ids)
        output_ids = self.text.answer(seed, output_tokens)
        request = request_from_tokens(
            request_id,
            prompt_ids,
            output_ids,
            self.config.profile.block_size_tokens,
            lora_name=lora_name,
            cache_salt=cache_salt,
            skip_cache_read=skip_cache_read,
        )
        now_s = self.now_s()
        self.life.engine.submit(request, now_s)
        generation = Generation(request_id, output_ids, now_s)
        self._generations[request_id] = generation
        self._wake.set()
        return generation

    def abort(self, generation: Generation) -> None:
        """Forget it; without effect once it has finished."""
        if self._generations.pop(generation.id, None) is not None:
            self.life.engine.abort(generation.id)

    async def tokens(self, generation: Generation) -> AsyncIterator[Sequence[int]]:
        """Ids as they come; the generator's end is the answer's."""
        sent = 0
        try:
            while not (generation.finished and sent == generation.available):
                await generation.wait()
                fresh = generation.output_ids[sent : generation.available]
                sent += len(fresh)
                if fresh:
                    yield fresh
        finally:
            self.abort(generation)

    def reset(self) -> bool:
        return self.life.engine.reset()

    def gauges(self) -> Gauges:
        return self.life.engine.gauges()

    def held(self) -> dict[int, tuple[int, Stored | None]]:
        """The truth: every hash in the block pool's table, its number of copies, and the event that stored it."""
        table = self.life.engine._pool.table
        return {h: (1 if isinstance(copies, int) else len(copies), self._truth.get(h)) for h, copies in table.items()}

    async def _run(self) -> None:
        cursor_s = 0.0
        engine = self.life.engine
        while True:
            begin_s = engine.next_step_s(cursor_s)
            if begin_s is None:
                self._wake.clear()
                await self._wake.wait()
                cursor_s = max(cursor_s, self.now_s())
                continue
            await self._sleep_until(begin_s)
            engine.slowdown = self.faults.fault.factor if self.faults.fault.kind == "slow" else 1.0
            result = engine.step(begin_s)
            if result is None:  # everything was aborted meanwhile
                continue
            await self._sleep_until(result.ends_s)
            cursor_s = result.ends_s
            self._late_s = max(self._late_s, self.now_s() - cursor_s)
            self._deliver(result)

    async def _sleep_until(self, at_s: float) -> None:
        wait_s = (at_s - self.now_s()) / self.config.speed
        await asyncio.sleep(max(wait_s, 0.0))

    def _deliver(self, result: StepResult) -> None:
        """The end of a step: events out, tokens to whom they belong."""
        self._remember(result)
        if result.events and self.life.publisher is not None:
            self.life.publisher.publish(result.events, at_s=time.time())
        self._steps += 1
        step, engine = self._steps, self.life.engine
        for first in result.first:
            g = self._generations.get(int(first.id))
            self._count_ttft(result.ends_s - (g.submitted_s if g else result.ends_s))
            if g is None:
                continue
            g.cached_tokens = first.cached_tokens
            g.offer(1, finished=False)
            g.due = 1 + self.config.stream_interval_tokens
            self._due[step + self.config.stream_interval_tokens].append(g)
        for request_id in result.finished:
            ended = self._generations.pop(int(request_id), None)
            if ended is not None:
                ended.offer(len(ended.output_ids), finished=True)
        for g in self._due.pop(step, ()):
            if g.id not in self._generations:
                continue
            done = engine.progress(g.id)
            if done >= g.due:
                g.offer(done, finished=False)
                g.due = done + self.config.stream_interval_tokens
            self._due[step + g.due - done].append(g)

    def _remember(self, result: StepResult) -> None:
        """Keep what each hash stands for as long as the pool holds it."""
        table = self.life.engine._pool.table
        for event in result.events:
            if isinstance(event, Stored):
                bs, parent = event.block_size_tokens, event.parent
                for n, h in enumerate(event.hashes):
                    ids = event.token_ids[n * bs : (n + 1) * bs]
                    salt = event.cache_salt if n == 0 else None
                    self._truth[h] = Stored((h,), parent, ids, bs, event.lora_name, salt)
                    parent = h
            elif isinstance(event, Removed):
                if event.hash not in table:
                    self._truth.pop(event.hash, None)
            elif isinstance(event, Cleared):
                self._truth.clear()

    def _count_ttft(self, ttft_s: float) -> None:
        self.ttft_sum_s += ttft_s
        for n, bound in enumerate(TTFT_BUCKETS_S):
            if ttft_s <= bound:
                self.ttft_counts[n] += 1
                return
        self.ttft_counts[-1] += 1


def _port(endpoint: str | None) -> int:
    return int(str(endpoint).rsplit(":", 1)[1])
