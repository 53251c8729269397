"""Which discovery the settings ask for. `kubernetes` is imported only where it is used.

May import: router.fleet, router.ops, router.settings.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence

from router.fleet.discovery import Discovery, DiscoveryStatus, OnPods, RestartReason
from router.fleet.state import PodSpec
from router.ops import Metrics
from router.settings import CommonSettings, SettingsError

log = logging.getLogger("warmroute.discovery")
DNS_INTERVAL_S = 2.0  # a headless Service's record follows its pods within about that


class CountingObserver:
    """What a discovery tells, as metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def synced(self, kind: str) -> None:
        """The list is as the source has it now."""
        self._metrics.discovery_synced.labels(kind=kind).set_to_current_time()

    def restarted(self, kind: str, reason: RestartReason) -> None:
        """One loop ended and begins anew."""
        self._metrics.discovery_restarts.labels(kind=kind, reason=reason).inc()


def build_discovery(settings: CommonSettings, on_pods: OnPods, metrics: Metrics) -> Discovery:
    """A discovery that is not running yet. Raises SettingsError with the cure."""
    observer = CountingObserver(metrics)
    if settings.discovery == "dns":
        if settings.service is None or settings.pod_port is None:
            raise SettingsError("--discovery dns needs --service HOSTNAME and --pod-port PORT")
        return DnsDiscovery(settings, on_pods, observer)
    if (settings.selector is None) == (settings.service is None):
        raise SettingsError("--discovery kubernetes needs one of --selector LABELS and --service NAME")
    from router.fleet.k8s_pods import Ports
    from router.fleet.kubernetes import KubernetesDiscovery

    try:
        return KubernetesDiscovery(
            on_pods,
            namespace=settings.namespace,
            selector=settings.selector,
            service=settings.service,
            ports=Ports(http=settings.pod_port, events=settings.events_port, replay=settings.replay_port),
            observer=observer,
        )
    except ValueError as exc:
        raise SettingsError(f"--selector {settings.selector!r}: {exc}") from exc


class DnsDiscovery:
    """Pods are the addresses of a host name: a headless Service, or a service of docker compose.

    A name that cannot be resolved keeps the last list: name servers have hiccups, and dead pods show themselves.
    """

    def __init__(self, settings: CommonSettings, on_pods: OnPods, observer: CountingObserver) -> None:
        assert settings.service is not None
        self._host = settings.service
        self._settings = settings
        self._on_pods = on_pods
        self._observer = observer
        self._last: Sequence[PodSpec] | None = None
        self._synced_at_s: float | None = None
        self._error: str | None = None
        self._restarts = 0

    async def run(self) -> None:
        """Ask again and again until cancelled."""
        while True:
            await self._look()
            await asyncio.sleep(DNS_INTERVAL_S)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._settings.pod_port, type=socket.SOCK_STREAM)
        except OSError as exc:
            if self._error is None:
                log.warning("name not resolved", extra={"fields": {"host": self._host, "error": exc.strerror}})
            self._error = f"{self._host} cannot be resolved: {exc.strerror}"
            self._restarts += 1
            self._observer.restarted("dns", "connect")
            return
        self._error, self._synced_at_s = None, time.monotonic()
        self._observer.synced("dns")
        specs = [self._spec(address) for address in sorted({str(info[4][0]) for info in found})]
        if specs != self._last:
            self._last = specs
            self._on_pods(specs)

    def _spec(self, address: str) -> PodSpec:
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{self._settings.pod_port}"
        events, replay = self._settings.events_port, self._settings.replay_port
        return PodSpec(
            identity=url,
            name=url,
            url=url,
            events=f"tcp://{host}:{events}" if events else None,
            replay=f"tcp://{host}:{replay}" if replay else None,
        )

    def status(self) -> DiscoveryStatus:
        """How it is doing."""
        age_s = None if self._synced_at_s is None else time.monotonic() - self._synced_at_s
        return DiscoveryStatus(
            kind="dns",
            synced=self._synced_at_s is not None,
            last_sync_age_s=age_s,
            restarts=self._restarts,
            last_error=self._error,
        )
