"""The real proxy on a real port, before fake pods, with a fake conductor: what every proxy test stands in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import aiohttp

from router.admin import AdminPages
from router.door import ApiKeys, Lifecycle
from router.ops import Metrics
from router.proxy.explained import explain_request
from router.proxy.front import Listener, listen
from router.proxy.handlers import ProxyApp, build_app
from router.proxy.limits import ProxyLimits
from router.proxy.pool import Pool
from router.proxy.upstream import AiohttpUpstream
from tests.fakes.fake_pod import FakePod, Script, echo
from tests.fakes.fake_routing import FakeConductor, FakeFleet


@dataclass
class World:
    """One router and its pods."""

    app: ProxyApp
    listener: Listener
    fleet: FakeFleet
    conductor: FakeConductor
    metrics: Metrics
    pods: list[FakePod]
    session: aiohttp.ClientSession
    lifecycle: Lifecycle
    scheme: str = "http"

    @property
    def port(self) -> int:
        return self.listener.port

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def pod(self) -> FakePod:
        return self.pods[0]

    @property
    def inflight(self) -> int:
        return self.fleet.bookings.inflight_requests

    def bodies(self) -> int:
        """Whole bodies that reached any pod."""
        return sum(len(p.requests) for p in self.pods)

    async def chat(self, **fields: object) -> aiohttp.ClientResponse:
        """POST a small chat; the body is not read."""
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.session.post(f"{self.url}/v1/chat/completions", json=body)

    async def raw(self, data: bytes, *, until: bytes | None = None, timeout_s: float = 20.0) -> bytes:
        """Write `data` on a fresh connection; what comes back until the other side closes, or until `until` is seen."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            await writer.drain()
            got = b""
            async with asyncio.timeout(timeout_s):
                while until is None or until not in got:
                    piece = await reader.read(65536)
                    if not piece:
                        break
                    got += piece
            return got
        finally:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def world(
    *scripts: Script,
    pods: Sequence[FakePod] | None = None,
    upstream: type[Pool] | type[AiohttpUpstream] = Pool,
    keys: Iterable[str] = (),
    spread: bool = False,
    prompt_tokens: int | None = None,
    models: Sequence[str] = ("m",),
    heard: bool = True,
    front_ssl: ssl.SSLContext | None = None,
    pods_ssl: ssl.SSLContext | None = None,
    **limits: object,
) -> AsyncIterator[World]:
    """A world with one pod a script, or with `pods` (started here)."""
    pods = list(pods) if pods is not None else [FakePod(s, name=f"pod{i}") for i, s in enumerate(scripts or (echo,))]
    for pod in pods:
        await pod.start()
    metrics = Metrics()
    fleet = FakeFleet([p.url for p in pods], models=models, heard=heard)
    conductor = FakeConductor(fleet, spread=spread, prompt_tokens=prompt_tokens)
    lifecycle = Lifecycle()
    lifecycle.phase = "serving"
    bounds = ProxyLimits(**limits)  # type: ignore[arg-type]
    behind = upstream(bounds, metrics, ssl_context=pods_ssl)
    pages = AdminPages(
        metrics=metrics,
        fleet=fleet,
        lifecycle=lifecycle,
        conductor=conductor,
        read_request=partial(explain_request, limits=bounds),
    )
    app = build_app(conductor, fleet, behind, bounds, metrics, pages=pages, keys=ApiKeys(keys), lifecycle=lifecycle)
    listener = await listen(app.front, host="127.0.0.1", port=0, ssl_context=front_ssl)
    try:
        async with aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)) as session:
            scheme = "https" if front_ssl else "http"
            yield World(app, listener, fleet, conductor, metrics, pods, session, lifecycle, scheme)
    finally:
        await listener.close()
        await app.close()
        await behind.close()
        for pod in pods:
            await pod.stop()


async def eventually(check: Callable[[], object], *, within_s: float = 15.0, what: str = "") -> None:
    """Poll until `check()` is true."""
    deadline_s = time.monotonic() + within_s
    while not check():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {within_s:g} s: {what or check}")
        await asyncio.sleep(0.01)


async def eventually_async(check: Callable[[], Awaitable[object]], *, within_s: float = 15.0) -> None:
    """Poll until `await check()` is true."""
    deadline_s = time.monotonic() + within_s
    while not await check():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {within_s:g} s")
        await asyncio.sleep(0.02)


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def rss_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
