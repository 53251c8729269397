"""Waiting in the router, over real sockets: the whole router before fake pods that compute when a test lets them.

As far as the router knows pods compute 1,000 tokens a second and a token is four bytes of body; half a second booked is
enough for a pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from router.admin import AdminPages
from router.app import Parts, proxy_limits
from router.door import ApiKeys, Lifecycle
from router.ops import access
from router.proxy.drain import drain
from router.proxy.explained import explain_request
from router.proxy.front import Listener, listen
from router.proxy.handlers import ProxyApp, build_app
from router.proxy.pool import Pool
from router.settings import ServeSettings, read
from tests.fakes.fake_pod import FakePod, Served
from tests.fakes.proxy_world import eventually

FULL = 4000  # bytes of a prompt: a second of prefill


class SlowPod(FakePod):
    """Computes no prompt before it is told to; streams after it."""

    def __init__(self, name: str, *, status: int = 200) -> None:
        super().__init__(self._answer, name=name)
        self.status = status
        self.computed = asyncio.Semaphore(0)

    async def _answer(self, served: Served) -> None:
        if self.status != 200:
            await served.reply(self.status, b"{}")
            return
        if not served.received.target.startswith("/v1/"):
            await served.reply(200, b"{}")
            return
        await self.computed.acquire()
        if json.loads(served.received.body or b"{}").get("stream"):
            await served.begin_stream()
            await served.event({"choices": [{"index": 0, "delta": {"content": "x"}}]})
            await served.event("[DONE]")
            await served.end()
        else:
            await served.reply(200, {"pod": self.name})

    def names(self) -> list[str]:
        """The prompts that came, in order."""
        return [json.loads(r.body)["messages"][0]["content"].split()[0] for r in self.requests]

    def compute(self, prompts: int = 1) -> None:
        """So many prompts more are done."""
        for _ in range(prompts):
            self.computed.release()


class Router:
    """The router in this process."""

    def __init__(
        self, parts: Parts, app: ProxyApp, listener: Listener, lifecycle: Lifecycle, session: aiohttp.ClientSession
    ) -> None:
        self.parts = parts
        self.app = app
        self.listener = listener
        self.lifecycle = lifecycle
        self.session = session
        self.url = f"http://127.0.0.1:{listener.port}"
        self.asked: list[asyncio.Task[tuple[int, dict[str, str], bytes]]] = []

    @property
    def waiting(self) -> int:
        return int(self.parts.metrics.value("warmroute_waiting_requests"))

    def ask(self, name: str, bytes_: int = FULL, *, path: str = "/v1/chat/completions", **more: object) -> asyncio.Task:
        """A streamed chat whose prompt begins with `name`."""
        headers = more.pop("headers", {})
        prompt = f"{name} ".ljust(bytes_, name[-1])
        body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "stream": True, **more}

        async def send() -> tuple[int, dict[str, str], bytes]:
            async with self.session.post(self.url + path, json=body, headers=headers) as reply:
                return reply.status, dict(reply.headers), await reply.read()

        task = asyncio.create_task(send())
        self.asked.append(task)
        return task

    async def in_line(self, name: str, bytes_: int = FULL, **more: object) -> asyncio.Task:
        """The same, once it waits."""
        before = self.waiting
        task = self.ask(name, bytes_, **more)
        await eventually(lambda: self.waiting == before + 1, what=f"{name} waits")
        return task

    async def fill(self, *pods: SlowPod) -> None:
        """One prompt on each pod, which is enough for it."""
        for i in range(len(pods)):
            self.ask(f"first-{i}")
            await eventually(lambda n=i + 1: sum(len(p.requests) for p in pods) == n)  # type: ignore[misc]
        assert all(len(pod.requests) == 1 for pod in pods)

    async def check_empty(self) -> None:
        """Nothing is left of anybody."""
        bookings = self.parts.fleet.bookings
        await eventually(lambda: bookings.inflight_requests == 0 and self.waiting == 0)
        assert not bookings.crowds()
        assert all(load.prefill_tokens == 0 for load in bookings.loads().values())
        assert self.app.parts.waiting is None or not self.app.parts.waiting._choosing


@contextlib.asynccontextmanager
async def router(*pods: FakePod, **settings: object) -> AsyncIterator[Router]:
    """Everything but the signal handlers of `warmroute serve`."""
    given = {
        "pod": [f"{pod.url},model=m" for pod in pods],
        "prefill_tokens_per_s": 1000.0,
        "overload_prefill_s": 0.5,
        "ask_pod_tokenize": False,
        **settings,
    }
    chosen = read(ServeSettings, given)
    parts, limits, lifecycle = Parts(chosen), proxy_limits(chosen), Lifecycle()
    pages = AdminPages(
        metrics=parts.metrics,
        fleet=parts.fleet,
        lifecycle=lifecycle,
        conductor=parts.conductor,
        read_request=explain_request,
        details=parts.details,
    )
    async with contextlib.AsyncExitStack() as stack:
        upstream = Pool(limits, parts.metrics)
        stack.push_async_callback(upstream.close)
        keys = ApiKeys(chosen.api_key)
        app = build_app(
            parts.conductor, parts.fleet, upstream, limits, parts.metrics, pages=pages, keys=keys, lifecycle=lifecycle
        )
        parts.waiting = app.parts.waiting
        stack.push_async_callback(app.close)
        await stack.enter_async_context(parts.running())
        listener = await listen(app.front, host="127.0.0.1", port=0)
        stack.push_async_callback(listener.close)
        lifecycle.phase = "serving"
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        await eventually(lambda: sum(bool(p["ready"]) for p in parts.fleet.status()) == len(pods), what="pods ready")
        running = Router(parts, app, listener, lifecycle, session)
        try:
            yield running
        finally:
            for pod in pods:
                if isinstance(pod, SlowPod):
                    pod.compute(1000)
            await asyncio.gather(*running.asked, return_exceptions=True)
            await running.check_empty()


@pytest.fixture
def lines() -> Iterator[list[dict[str, object]]]:
    """The access log's fields."""
    seen: list[dict[str, object]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.fields)  # type: ignore[attr-defined]

    handler, level = Keep(), access.level
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    yield seen
    access.removeHandler(handler)
    access.setLevel(level)


async def test_off_by_default_pods_queue() -> None:
    async with SlowPod("a") as a, router(a, overload_prefill_s=0.0) as r:
        assert r.app.parts.waiting is None
        await r.fill(a)
        for n in range(4):
            r.ask(f"more-{n}")
        await eventually(lambda: len(a.requests) == 5)


async def test_a_wait_that_is_over_is_429_with_retry_after(lines: list[dict[str, object]]) -> None:
    async with SlowPod("a") as a, router(a, overload_wait_s=0.2) as r:
        await r.fill(a)
        status, headers, body = await r.ask("late", 40_000)
        assert status == 429
        assert headers["Retry-After"] == "1"
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
        assert len(a.requests) == 1
        await eventually(lambda: any(line["status"] == 429 for line in lines))
        [line] = [line for line in lines if line["status"] == 429]
        assert 200 <= line["waited_ms"] < 5000  # type: ignore[operator]
        assert line["note"] == "overloaded"
        assert r.parts.metrics.value("warmroute_turned_away_total", reason="wait_over") == 1


async def test_with_no_time_to_wait_the_answer_comes_at_once() -> None:
    async with SlowPod("a") as a, router(a, overload_wait_s=0.0) as r:
        await r.fill(a)
        assert (await r.ask("late"))[0] == 429
        async with r.session.post(r.url + "/tokenize", json={"model": "m", "prompt": "x"}) as reply:
            assert reply.status == 200, "what costs no prefill does not wait"


async def test_the_pod_that_frees_first_gets_it(lines: list[dict[str, object]]) -> None:
    async with SlowPod("a") as a, SlowPod("b") as b, router(a, b) as r:
        await r.fill(a, b)
        late = await r.in_line("late")
        assert r.parts.details()["waiting"]["requests"] == 1
        b.compute(1)
        await eventually(lambda: len(b.requests) == 2)
        assert len(a.requests) == 1
        b.compute(1)
        assert (await late)[0] == 200
        await eventually(lambda: any("waited_ms" in line for line in lines))
        assert [line["pod"] for line in lines if "waited_ms" in line] == [b.url]


async def test_priority_overtakes_by_header_and_by_body() -> None:
    async with SlowPod("a") as a, router(a) as r:
        await r.fill(a)
        await r.in_line("usual")
        await r.in_line("later", priority=3)
        await r.in_line("sooner", priority=-2)
        await r.in_line("soonest", headers={"X-Vllm-Priority": "-5"}, priority=9)
        for n in range(2, 6):
            a.compute(1)
            await eventually(lambda n=n: len(a.requests) == n)  # type: ignore[misc]
        assert a.names() == ["first-0", "soonest", "sooner", "usual", "later"]
        soonest = a.requests[1]
        assert soonest.header("X-Vllm-Priority") == "-5", "it means the same in the pod's own queue"
        assert json.loads(soonest.body)["priority"] == 9, "bodies go on as they came"


async def test_a_noisy_tenant_does_not_starve_another() -> None:
    keys = {"noisy": {"Authorization": "Bearer key-1"}, "quiet": {"Authorization": "Bearer key-2"}}
    async with (
        SlowPod("a") as a,
        router(a, api_key=["key-1", "key-2"], tenant_header="authorization", overload_queue_requests=6) as r,
    ):
        r.ask("first-0", headers=keys["noisy"])
        await eventually(lambda: len(a.requests) == 1)
        noisy = [await r.in_line(f"noisy-{n}", headers=keys["noisy"]) for n in range(6)]
        quiet = r.ask("quiet-0", 8 * FULL, headers=keys["quiet"])
        await eventually(lambda: sum(t.done() for t in noisy) == 1, what="one of the noisy gives way")
        assert not quiet.done()
        for n in range(2, 4):
            a.compute(1)
            await eventually(lambda n=n: len(a.requests) == n)  # type: ignore[misc]
        assert "quiet-0" in a.names()[1:3]


async def test_a_client_that_leaves_frees_its_place_at_once() -> None:
    async with SlowPod("a") as a, router(a) as r:
        await r.fill(a)
        gone = await r.in_line("gone")
        stays = await r.in_line("stays")
        gone.cancel()
        await eventually(lambda: r.waiting == 1)
        a.compute(2)
        assert (await stays)[0] == 200
        assert a.names() == ["first-0", "stays"]
        assert r.parts.metrics.value("warmroute_client_gone_total") == 1
        assert r.parts.metrics.value("warmroute_waited_seconds_count", outcome="left") == 1


async def test_whoever_was_sent_once_waits_no_more() -> None:
    """The second choice goes out although nobody has room: it would stand behind those that came after it."""
    async with SlowPod("a") as a, SlowPod("b", status=503) as b, router(a, b) as r:
        r.ask("first-0")
        await eventually(lambda: len(a.requests) == 1)  # b may have refused it first
        twice = r.ask("twice")
        await eventually(lambda: "twice" in a.names())
        assert "twice" in b.names()
        a.compute(2)
        assert (await twice)[0] == 200


async def test_sigterm_while_waiting_the_grace_is_for_those_in_line_too() -> None:
    async with SlowPod("a") as a, router(a) as r:
        await r.fill(a)
        late = await r.in_line("late")
        draining = asyncio.create_task(drain(r.app, r.listener, r.lifecycle, delay_s=0.0, grace_s=20.0))
        await eventually(lambda: r.lifecycle.draining)
        a.compute(2)
        assert (await late)[0] == 200
        assert await draining is True


async def test_sigterm_while_waiting_when_the_grace_is_over() -> None:
    async with SlowPod("a") as a, router(a) as r:
        await r.fill(a)
        late = await r.in_line("late")
        assert await drain(r.app, r.listener, r.lifecycle, delay_s=0.0, grace_s=0.2) is False
        status, headers, body = await late
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "shutting down" in json.loads(body)["error"]["message"]
        assert len(a.requests) == 1


async def test_replies_in_one_piece_do_not_count_as_prefill_for_as_long_as_they_decode() -> None:
    async with SlowPod("a") as a, router(a) as r:
        r.ask("first-0", stream=False)
        await eventually(lambda: len(a.requests) == 1)
        await r.in_line("late")
        await eventually(lambda: len(a.requests) == 2, within_s=10, what="a second of prefill is over")


@pytest.mark.parametrize("seed", range(2))
async def test_a_crowd_that_comes_waits_and_goes_leaves_nothing(seed: int) -> None:
    """Every ending at once; `router` checks that bookings and line are empty."""
    async with SlowPod("a") as a, SlowPod("b", status=503) as b, router(a, b, overload_queue_requests=20) as r:
        a.compute(60)
        tasks = []
        for n in range(120):
            tasks.append(r.ask(f"q{n}", 200 * (n % 30 + 1), priority=n % 3, stream=n % 2 == 0))
            if n % 4 == seed:
                await asyncio.sleep(0.01)
                tasks[n // 2].cancel()
        a.compute(1000)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        statuses = {d[0] for d in done if isinstance(d, tuple)}
        assert 200 in statuses
        assert statuses <= {200, 429, 503}
        assert len(b.requests) > 0
