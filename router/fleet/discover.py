"""Which discovery the settings ask for. `kubernetes` is imported only where it is used.

May import: router.fleet, router.ops, router.settings.
"""

from __future__ import annotations

from router.fleet.discovery import Discovery, OnPods, RestartReason
from router.fleet.polled import PolledDiscovery, addresses_of, lines_of
from router.ops import Metrics
from router.settings import CommonSettings, SettingsError

DNS_INTERVAL_S = 2.0  # a headless Service's record follows its pods within about that
FILE_INTERVAL_S = 1.0


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
    match settings.discovery:
        case "dns":
            if settings.service is None or settings.pod_port is None:
                raise SettingsError("--discovery dns needs --service HOSTNAME and --pod-port PORT")
            look = addresses_of(
                settings.service,
                port=settings.pod_port,
                events_port=settings.events_port,
                replay_port=settings.replay_port,
            )
            return PolledDiscovery("dns", look, on_pods, observer, interval_s=DNS_INTERVAL_S)
        case "file":
            if settings.pods_file is None:
                raise SettingsError("--discovery file needs --pods-file PATH, with one SPEC a line, as after --pod")
            return PolledDiscovery("file", lines_of(settings.pods_file), on_pods, observer, interval_s=FILE_INTERVAL_S)
    return _kubernetes(settings, on_pods, observer)


def _kubernetes(settings: CommonSettings, on_pods: OnPods, observer: CountingObserver) -> Discovery:
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
        raise SettingsError(str(exc)) from exc
