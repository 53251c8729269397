"""Composition root of `warmroute index`: a fleet to learn the pods from, an Indexer that writes Redis, an admin port.

May import: indexer, router.index, router.fleet, router.ops, router.process, router.settings.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

from indexer.app import Indexer
from indexer.check import Report, check, show
from indexer.follow import follow
from router.admin import AdminPages
from router.door import Lifecycle
from router.fleet.build import build_fleet, count_pods, discovery_shown, fleet_specs, start_pods
from router.index.redis_writer import RedisIndexWriter
from router.ops import Metrics
from router.process import begin_log, open_admin, run_on_uvloop, stop_signals
from router.settings import IndexSettings, SettingsError

log = logging.getLogger("warmroute.index")


async def _serve(settings: IndexSettings) -> None:
    if settings.redis_url is None:
        raise SettingsError("--redis-url is needed: without a shared index `warmroute serve` keeps its own")
    specs, metrics, lifecycle, stop = fleet_specs(settings), Metrics(), Lifecycle(), stop_signals()
    fleet = build_fleet(settings)
    async with AsyncExitStack() as stack:
        writer = RedisIndexWriter(settings.redis_url, seed=settings.key_seed)
        await writer.start()
        stack.push_async_callback(writer.close)
        indexer = Indexer(writer, seed=settings.key_seed, metrics=metrics)
        await indexer.start()
        stack.push_async_callback(indexer.close)
        follow(fleet, indexer)
        count_pods(fleet, metrics)
        await fleet.start()
        stack.push_async_callback(fleet.close)
        pages = AdminPages(
            metrics=metrics,
            fleet=fleet,
            lifecycle=lifecycle,
            details=lambda: {"discovery": discovery_shown(fleet), "index": {"workers": indexer.status()}},
        )
        await open_admin(pages, settings, None, stack)
        await start_pods(fleet, settings, specs, stack, metrics)
        lifecycle.phase = "serving"
        await stop.wait()
        lifecycle.phase = "draining"


def serve_index(settings: IndexSettings) -> int:
    """`warmroute index`; returns the exit status."""
    begin_log(settings)
    if settings.check:
        reports: list[Report] = []

        async def look() -> None:
            reports.extend(await check(settings))

        return run_on_uvloop(look) or show(reports)
    return run_on_uvloop(lambda: _serve(settings))
