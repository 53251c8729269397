"""From settings to a fleet: static pods, or a discovery that runs as long as its owner.

May import: router.fleet, router.ops, router.settings.
"""

from __future__ import annotations

import asyncio
import logging
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

log = logging.getLogger("warmroute.fleet")
_DISCOVERY_OF = {"selector": "kubernetes", "service": "kubernetes or dns", "pods-file": "file"}


def fleet_specs(settings: CommonSettings) -> list[PodSpec]:
    """The pods of --pod. Raises SettingsError with the cure."""
    if settings.discovery != "static":
        if settings.pod:
            raise SettingsError(
                f"--pod and --discovery {settings.discovery} are two answers to one question; leave one out"
            )
        return []
    for flag, value in (
        ("selector", settings.selector),
        ("service", settings.service),
        ("pods-file", settings.pods_file),
    ):
        if value is not None:
            raise SettingsError(
                f"--{flag} needs --discovery {_DISCOVERY_OF[flag]}; with static discovery it is not read"
            )
    if not settings.pod:
        log.warning("no pod is configured, so nothing can be served: give --pod SPEC for each pod, or --discovery")
    try:
        return parse_specs(settings.pod)
    except ValueError as exc:
        raise SettingsError(str(exc)) from exc


def build_fleet(settings: CommonSettings) -> Fleet:
    """A fleet that is not started yet."""
    longest_s = settings.scrape_interval_s + settings.scrape_timeout_s
    if settings.scrape_stale_after_s < longest_s:  # H66
        log.warning(
            "--scrape-stale-after-s %g is below --scrape-interval-s + --scrape-timeout-s (%g): the load of a pod that "
            "answers slowly will be unknown again and again; raise it, or lower those",
            settings.scrape_stale_after_s,
            longest_s,
        )
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

    said: dict[str, str | None] = {}

    def changed(state: FleetState) -> None:
        _tell(state, said)
        ready = sum(p.serving for p in state.pods.values())
        metrics.pods.labels(state="ready").set(ready)
        metrics.pods.labels(state="not_ready").set(len(state.pods) - ready)

    fleet.on_change(changed)
    metrics.pod_rows.rows = fleet.status
    changed(fleet.state)


def _tell(state: FleetState, said: dict[str, str | None]) -> None:
    """Log each pod that has become ready or unready, or is so for another reason; `said` is what was logged."""
    for identity in said.keys() - state.pods.keys():
        del said[identity]
    for identity, pod in state.pods.items():
        if pod.not_ready == "starting" or said.get(identity, "starting") == pod.not_ready:
            continue
        said[identity] = pod.not_ready
        fields = {"pod": pod.spec.name, "reason": pod.not_ready, "detail": pod.detail}
        if pod.serving:
            log.info("pod is ready", extra={"fields": {"pod": pod.spec.name, "models": [m.id for m in pod.models]}})
        else:
            log.warning("pod takes no requests", extra={"fields": fields})


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
