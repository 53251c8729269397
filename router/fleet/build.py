"""From settings to a fleet: static pods, or a discovery that runs as long as its owner.

May import: router.fleet, router.ops, router.settings.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from router.fleet.fleet import Fleet, FleetTimes
from router.fleet.state import FleetState, PodSpec
from router.fleet.static import parse_specs
from router.ops import Metrics
from router.settings import CommonSettings, SettingsError


def fleet_specs(settings: CommonSettings) -> list[PodSpec]:
    """The pods of --pod. Raises SettingsError with the cure."""
    try:
        return parse_specs(settings.pod)
    except ValueError as exc:
        raise SettingsError(str(exc)) from exc


def build_fleet(settings: CommonSettings) -> Fleet:
    """A fleet that is not started yet."""
    return Fleet(
        times=FleetTimes(
            scrape_interval_s=settings.scrape_interval_s,
            scrape_timeout_s=settings.scrape_timeout_s,
            scrape_stale_after_s=settings.scrape_stale_after_s,
            probe_timeout_s=settings.probe_timeout_s,
        ),
        default_block_size_tokens=settings.block_size,
        ssl_context=pod_tls(settings),
        headers={"Authorization": f"Bearer {settings.pod_api_key}"} if settings.pod_api_key else None,
    )


def count_pods(fleet: Fleet, metrics: Metrics) -> None:
    """The ready-pod count is always there, 0 included (H73)."""

    def changed(state: FleetState) -> None:
        ready = sum(p.serving for p in state.pods.values())
        metrics.pods.labels(state="ready").set(ready)
        metrics.pods.labels(state="not_ready").set(len(state.pods) - ready)

    fleet.on_change(changed)
    metrics.pod_rows.rows = fleet.status
    changed(fleet.state)


async def start_pods(
    fleet: Fleet, settings: CommonSettings, specs: Sequence[PodSpec], stack: AsyncExitStack, metrics: Metrics
) -> None:
    """Pods from the settings at once, or from a discovery that runs until the stack is closed."""
    if settings.discovery == "static":
        fleet.set_pods(specs)
        return
    from router.fleet.discover import build_discovery  # kubernetes is imported only where it is asked for

    discovery = build_discovery(settings, fleet.set_pods, metrics)
    fleet.discovery = discovery
    task = asyncio.create_task(discovery.run(), name="discovery")
    stack.callback(task.cancel)


def discovery_shown(fleet: Fleet) -> dict[str, Any] | None:
    """How the discovery is doing, for /ready and /debug/pods; None with pods from the settings."""
    return None if fleet.discovery is None else dict(msgspec.to_builtins(fleet.discovery.status()))


def pod_tls(settings: CommonSettings) -> ssl.SSLContext | None:
    """Trust for https pods beyond the system's own. Raises SettingsError with the cure."""
    if settings.pod_ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(settings.pod_ca))
    except (OSError, ssl.SSLError) as exc:
        raise SettingsError(f"--pod-ca {settings.pod_ca} cannot be used: {exc}") from exc
