"""Clients: open and closed loop, sessions with think time, every stream measured where it arrives.

One `Crowd` is one process's worth of clients; `crowds` spreads a stage over several.
May import: the standard library, aiohttp, msgspec, loadtest.workload, loadtest.prompts, loadtest.samples.
"""

import asyncio
import contextlib
import gc
import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from loadtest.prompts import Api, Prompts
from loadtest.samples import Gaps, Sample, StageOutcome
from loadtest.workload import Session, Stage, Turn

BODIES_AHEAD = 64  # at most so many requests are built before they are due
BUILD_S = 0.01  # what building one may take; with less time left than that the next request is only waited for

_TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content)":\s*"(?!")')
_FIELD = re.compile(rb'"usage":\s*\{')
_decode = msgspec.json.Decoder().decode


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go. Several URLs are taken in turn."""

    urls: tuple[str, ...]
    model: str
    api: Api = "chat"
    headers: Mapping[str, str] = {}
    extra_body: Mapping[str, Any] = {}
    timeout_s: float = 600.0  # of one request, as a client would give up
    drain_limit_s: float = 600.0  # of a stage, after the last request was sent


class Live(msgspec.Struct):
    """What is going on right now; read by the progress display."""

    sent: int = 0
    in_flight: int = 0
    done: int = 0
    failed: int = 0
    last_failure: str = ""
    ttft_sum_s: float = 0.0
    ttft_count: int = 0


class Crowd:
    """The clients of one process. Use as an async context manager."""

    def __init__(self, target: Target, prompts: Prompts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._target = target
        self._prompts = prompts
        self._clock = clock
        self._url = itertools.cycle(target.urls)
        self._path = "/v1/chat/completions" if target.api == "chat" else "/v1/completions"
        self.live = Live()

    async def __aenter__(self) -> "Crowd":
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            timeout=aiohttp.ClientTimeout(total=self._target.timeout_s, sock_connect=10.0),
            headers={"Content-Type": "application/json", **self._target.headers},
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    async def run(self, stage: Stage, sessions: Sequence[Session], *, begin_s: float | None = None) -> StageOutcome:
        """One stage from `begin_s` (of the clock; None: now) until all is answered or the drain limit is over."""
        out = StageOutcome(stage.name, stage.rate_per_s, stage.seconds, stage.measured)
        out.planned_requests = sum(len(s.turns) for s in sessions)
        gc.collect()
        gc.freeze()  # a full collection walks the whole workload, and nothing is sent meanwhile
        begin_s = self._clock() if begin_s is None else begin_s
        cpu_s = time.process_time()
        loop = self._closed if stage.concurrency else self._open
        try:
            await loop(stage, sessions, begin_s, out)
        finally:
            gc.unfreeze()
            out.wall_s = self._clock() - begin_s
            out.client_cpu_ratio = (time.process_time() - cpu_s) / max(out.wall_s, 1e-9)
        return out

    async def _open(self, stage: Stage, sessions: Sequence[Session], begin_s: float, out: StageOutcome) -> None:
        """Every session starts at its time, whatever became of the others."""
        running: set[asyncio.Task[None]] = set()
        ordered = sorted(sessions, key=lambda s: s.start_s)
        coming = iter(ordered)
        bodies: deque[bytes] = deque()  # built before they are due, so that building makes nothing late
        for session in ordered:
            due_s = begin_s + session.start_s
            while not bodies or (len(bodies) < BODIES_AHEAD and due_s - self._clock() > BUILD_S):
                if (later := next(coming, None)) is None:
                    break
                bodies.append(self._body(later.turns[0], {}))
                await asyncio.sleep(0)  # the streams' turn
            await asyncio.sleep(max(due_s - self._clock(), 0.0))
            task = asyncio.create_task(self._session(session, due_s, begin_s, out, bodies.popleft()))
            running.add(task)
            task.add_done_callback(running.discard)
        await self._drain(running, out)

    async def _closed(self, stage: Stage, sessions: Sequence[Session], begin_s: float, out: StageOutcome) -> None:
        """`concurrency` sessions at a time; with `seconds` set, none begins later than that."""
        queue = iter(sessions)

        async def client() -> None:
            for session in queue:
                if stage.seconds and self._clock() - begin_s >= stage.seconds:
                    return
                await self._session(session, self._clock(), begin_s, out, self._body(session.turns[0], {}))

        wait_s = begin_s - self._clock()
        await asyncio.sleep(max(wait_s, 0.0))
        running = {asyncio.create_task(client()) for _ in range(min(stage.concurrency or 1, len(sessions)))}
        await self._drain(running, out, limit_s=None if stage.seconds == 0 else stage.seconds)

    async def _drain(self, running: set[asyncio.Task[None]], out: StageOutcome, limit_s: float | None = 0.0) -> None:
        if not running:
            return
        timeout = None if limit_s is None else limit_s + self._target.drain_limit_s
        done, late = await asyncio.wait(set(running), timeout=timeout)
        for task in late:
            task.cancel()  # its request is counted as unfinished
        await asyncio.gather(*late, return_exceptions=True)
        for task in done:
            task.result()

    async def _session(self, session: Session, due_s: float, begin_s: float, out: StageOutcome, body: bytes) -> None:
        """One turn after the other; a failed turn ends it."""
        answers: dict[int, str] = {}
        for n, turn in enumerate(session.turns):
            if n:
                body = self._body(turn, answers)
                due_s += turn.think_s
                await asyncio.sleep(max(due_s - self._clock(), 0.0))
            more = n + 1 < len(session.turns)
            sample, answer = await self._ask(body, turn, due_s, begin_s, out, want_text=more)
            if sample.failure is not None:
                return
            due_s = begin_s + sample.at_s + sample.e2e_s
            answers[turn.answer.content] = answer

    def _body(self, turn: Turn, answers: Mapping[int, str]) -> bytes:
        t = self._target
        return self._prompts.body(turn, answers, api=t.api, model=t.model, extra=t.extra_body)

    async def _ask(
        self, body: bytes, turn: Turn, due_s: float, begin_s: float, out: StageOutcome, *, want_text: bool
    ) -> tuple[Sample, str]:
        """Send one request and follow its stream to the end. What goes wrong becomes the sample's failure."""
        stream = Stream(self._clock(), out.gaps, keep_events=want_text)
        failure: str | None = "unfinished"
        live = self.live
        live.sent += 1
        live.in_flight += 1
        try:
            failure = await self._follow(body, stream)
        except TimeoutError:
            failure = "timeout"
        except aiohttp.ClientConnectorError:
            failure = "connect"
        except (aiohttp.ClientError, OSError) as exc:
            failure = "cut" if stream.status else f"broken: {type(exc).__name__}"
        finally:
            ended_s = self._clock()
            live.in_flight -= 1
            live.done += 1
            if failure is not None:
                live.failed += 1
                live.last_failure = failure
            sample = stream.sample(begin_s, due_s, ended_s, failure, turn.group)
            out.samples.append(sample)
        return sample, stream.text() if want_text else ""

    async def _follow(self, body: bytes, stream: "Stream") -> str | None:
        async with self._http.post(next(self._url) + self._path, data=body) as reply:
            stream.status = reply.status
            stream.headers(reply.headers)
            if reply.status != 200:
                await reply.read()
                return f"http_{reply.status}"
            async for chunk in reply.content.iter_any():
                waiting = stream.first_s is None
                stream.feed(chunk, self._clock())
                if waiting and stream.first_s is not None:
                    self.live.ttft_sum_s += stream.first_s - stream.sent_s
                    self.live.ttft_count += 1
        return stream.verdict()


def _data(event: bytes) -> bytes:
    """What an event carries; gateways put `event:` and `id:` lines and comments beside it."""
    return b"".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))


class Stream:
    """What one streamed answer says about itself as its bytes come in. No socket."""

    def __init__(self, sent_s: float, gaps: Gaps, *, keep_events: bool = False) -> None:
        self.sent_s = sent_s
        self.status = 0
        self.first_s: float | None = None
        self._last_s = 0.0
        self._gaps = gaps
        self._rest = b""
        self._kept: list[bytes] | None = [] if keep_events else None
        self._done = False
        self._error: str | None = None
        self._usage: dict[str, Any] = {}
        self._events = self._reads = 0
        self._pod: str | None = None
        self._matched: int | None = None

    def headers(self, headers: Mapping[str, str]) -> None:
        self._pod = headers.get("x-warmroute-pod")
        matched = headers.get("x-warmroute-matched-tokens", "")
        self._matched = int(matched) if matched.isdigit() else None

    def feed(self, chunk: bytes, now_s: float) -> None:
        """Bytes of the body that came at `now_s`."""
        data = self._rest + chunk if self._rest else chunk
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        before = self._events
        for event in events:
            if _TEXT.search(event):
                self._text_event(event, now_s)
            if event.endswith(b"[DONE]"):  # whatever stands before it; JSON ends with a brace
                self._done = True
            elif b'"usage"' in event and _FIELD.search(event):
                self._read_usage(event)
            elif b'"error"' in event and b'"choices"' not in event:
                self._error = "error_event"
        self._reads += self._events > before

    def _text_event(self, event: bytes, now_s: float) -> None:
        self._events += 1
        if self.first_s is None:
            self.first_s = now_s
        else:
            self._gaps.add(now_s - self._last_s)
        self._last_s = now_s
        if self._kept is not None:
            self._kept.append(event)

    def _read_usage(self, event: bytes) -> None:
        try:
            usage = _decode(_data(event))["usage"]
        except (msgspec.DecodeError, KeyError, TypeError):
            return
        if isinstance(usage, dict):
            self._usage = usage

    def verdict(self) -> str | None:
        """None when the answer came whole; else what was missing."""
        if self._error:
            return self._error
        if not self._done:
            return "cut"
        return None if self._events else "empty"

    def text(self) -> str:
        """The whole answer, of a stream that kept its events."""
        choices = []
        for event in self._kept or ():
            with contextlib.suppress(msgspec.DecodeError, AttributeError):  # a gateway's own way with events
                choices += _decode(_data(event)).get("choices", ())
        return "".join(c.get("text") or (c.get("delta") or {}).get("content") or "" for c in choices)

    def sample(self, begin_s: float, due_s: float, ended_s: float, failure: str | None, group: str) -> Sample:
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return Sample(
            at_s=round(self.sent_s - begin_s, 4),
            late_s=round(max(self.sent_s - due_s, 0.0), 5),
            ttft_s=None if self.first_s is None else round(self.first_s - self.sent_s, 5),
            e2e_s=round(ended_s - self.sent_s, 5),
            prompt_tokens=self._usage.get("prompt_tokens"),
            output_tokens=self._usage.get("completion_tokens") or self._events,
            cached_tokens=cached,
            events=self._events,
            reads=self._reads,
            failure=failure,
            pod=self._pod,
            matched_tokens=self._matched,
            group=group,
        )
