"""Two routers over a real Redis: each sees what the other has under way, until the other is gone."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from router.core.types import BlockKey, WorkerAddress
from router.exchange import Exchange
from router.fleet.bookings import Bookings
from router.index.local import LocalView
from router.ops import Metrics
from tests.fakes.redis_servers import ENGINES, Server, running

A = WorkerAddress("http://a")
KEYS = [BlockKey(bytes([i]) * 8) for i in range(12)]


@pytest.fixture(params=ENGINES)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with running(request.param, tmp_path) as it:
        yield it


async def until(true: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def router(
    url: str, seed: str = "s", *, metrics: Metrics | None = None, interval_s: float = 0.1
) -> AsyncIterator[tuple[Exchange, Bookings, LocalView]]:
    bookings, local, metrics = Bookings(), LocalView(), metrics or Metrics()
    exchange = Exchange(url, seed=seed, bookings=bookings, local=local, metrics=metrics, interval_s=interval_s)
    await exchange.start()
    try:
        yield exchange, bookings, local
    finally:
        await exchange.close()


async def test_two_routers_see_each_other_and_forget_who_left(server: Server) -> None:
    async with router(server.url) as (one, _, local):
        async with router(server.url) as (two, bookings, _), router(server.url, seed="other") as (stranger, _, _):
            await until(lambda: one.status()["peers"] == 1 and two.status()["peers"] == 1)
            bookings.hold(A, prefill_tokens=700, prompt_tokens=900)
            two.peers.chose(A, KEYS, 0)
            await until(lambda: one.peers.load(A, time.monotonic()).inflight_requests == 1)
            assert one.peers.load(A, time.monotonic()).prefill_tokens == 700
            await until(lambda: local.holders(KEYS) == {A: len(KEYS)})
            assert stranger.status()["peers"] == 0, "another installation's"
        await until(lambda: one.status()["peers"] == 0)
        assert one.peers.load(A, time.monotonic()).inflight_requests == 0


async def test_redis_goes_and_comes_back(server: Server) -> None:
    async with router(server.url) as (one, _, _), router(server.url) as (two, _, _):
        await until(lambda: one.status()["peers"] == 1)
        server.stop()
        await until(lambda: one.status()["not_told"] >= 1)
        await until(lambda: one.status()["peers"] == 0 and two.status()["peers"] == 0)
        server.start()
        await until(lambda: one.status()["peers"] == 1 and two.status()["peers"] == 1)


async def test_metrics_say_who_is_heard_how_old_it_is_and_what_was_not_understood(server: Server) -> None:
    metrics = Metrics()
    async with router(server.url, metrics=metrics, interval_s=0.05) as (one, _, _):
        assert (metrics.value("warmroute_peers"), metrics.value("warmroute_peers_age_seconds")) == (0, 0)
        async with router(server.url, interval_s=0.05):
            await until(lambda: metrics.value("warmroute_peers") == 1)
            assert 0 <= metrics.value("warmroute_peers_age_seconds") <= 1.0
            await until(lambda: metrics.value("warmroute_peer_messages_total", what="told") >= 2)
            await one._link.call(("PUBLISH", one._channel, b"\xc1"), deadline_s=5.0)
            await until(lambda: metrics.value("warmroute_peer_messages_total", what="not_understood") == 1)
        assert one.status()["not_understood"] == 1
        assert one.status()["interval_ms"] == 50
        server.stop()
        await until(lambda: metrics.value("warmroute_peer_messages_total", what="not_told") >= 1)
        await until(lambda: metrics.value("warmroute_peers") == 0)
