"""What an operator sees: metrics and log lines. Shell.

Metric names begin with `warmroute_`; every label comes from a closed set (never a URL, a model or a key from a client,
H72). Log lines hold no prompt, no reply, no header value and no query string (H15): callers pass fields, not requests.
May import: the standard library, msgspec, prometheus_client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TextIO

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
LOOKUP_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PodRows(Collector):
    """Figures of each pod, read from the fleet's own rows at each scrape, so that a pod that is gone leaves no series.

    Several routers tell the same of the pods' own counters; add up over pods, take the greatest over routers.
    """

    GAUGES: ClassVar = {
        "inflight_requests": ("pod_inflight_requests", "requests that this router has on the pod now"),
        "booked_prefill_tokens": (
            "pod_booked_prefill_tokens",
            "uncached prompt tokens sent there and not yet computed, weighed by what their attention costs",
        ),
        "running_requests": ("pod_running_requests", "requests running on the pod, as it says itself"),
        "waiting_requests": ("pod_waiting_requests", "requests waiting on the pod, as it says itself"),
        "kv_held_ratio": (
            "pod_kv_held_ratio",
            "share of the pod's KV blocks held by running requests, greatest of its ranks",
        ),
    }
    COUNTERS: ClassVar = {
        "requests_total": ("pod_requests", "requests that this router has sent to the pod"),
        "cache_queries_tokens": (
            "pod_cache_queries_tokens",
            "prompt tokens that the pod looked up in its cache (all clients)",
        ),
        "cache_hits_tokens": ("pod_cache_hits_tokens", "of those, tokens that it found: delivered, not predicted"),
    }

    def __init__(self) -> None:
        self.rows: Callable[[], list[dict[str, Any]]] = list

    def collect(self) -> Iterator[Metric]:
        """One sample a pod and figure; a figure that is not known is absent (H73)."""
        rows = self.rows()
        for table, family in ((self.GAUGES, GaugeMetricFamily), (self.COUNTERS, CounterMetricFamily)):
            for key, (name, text) in table.items():
                metric = family(f"warmroute_{name}", text, labels=["pod"])
                for row in rows:
                    known = [w[key] for w in row["workers"] if w.get(key) is not None]
                    if known:
                        metric.add_metric([row["pod"]], max(known) if key == "kv_held_ratio" else sum(known))
                yield metric


class Metrics:
    """One per process, over its own registry, so that two routers in one test do not meet."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry(auto_describe=True)
        ProcessCollector(namespace="warmroute", registry=self.registry)  # CPU, memory, file descriptors

        # -- the proxy ----------------------------------------------------------------------------------------------
        self.requests = self.counter("requests", "requests answered, by route and status", "endpoint", "status")
        self.request_seconds = self.histogram(
            "request_seconds", "from request head to the end of the reply", "endpoint"
        )
        self.first_byte_seconds = self.histogram(
            "first_byte_seconds", "from request head to the first byte of the pod's reply body", "endpoint"
        )
        self.inflight = self.gauge("inflight_requests", "requests being handled now")
        self.client_gone = self.counter("client_gone", "clients that left before their reply had ended (499)")
        self.retries = self.counter("retries", "attempts on another worker, by what went wrong on the last", "reason")
        self.ambiguous_retries = self.counter(
            "ambiguous_retries", "retries after a reset on a reused connection: the pod may have seen the request"
        )
        self.retries_denied = self.counter("retries_denied", "retries not made, by what forbade them", "reason")
        self.pod_failures = self.counter("pod_failures", "what went wrong on pods, by kind", "kind")
        self.broken_streams = self.counter("broken_streams", "replies that broke after their head was sent", "reason")
        self.upstream_connections = self.counter("upstream_connections", "connections to pods used by requests", "kind")
        self.pod_connections = self.gauge("pod_connections", "open connections to pods, idle ones included")
        self.client_connections = self.gauge("client_connections", "open connections of clients")
        self.tenant_salts = self.counter(
            "tenant_salts", "bodies that were to get their tenant's cache_salt, by what came of it", "result"
        )
        self.connections_refused = self.counter("connections_refused", "client connections closed at once", "reason")

        # -- routing ------------------------------------------------------------------------------------------------
        self.decisions = self.counter("decisions", "choices of a worker", "policy", "reason")
        self.refusals = self.counter("refusals", "requests for which no worker was found", "reason")
        self.waiting = self.gauge("waiting_requests", "requests held because every pod had enough to do")
        self.waited_seconds = self.histogram("waited_seconds", "waits for room, by how they ended", "outcome")
        self.turned_away = self.counter("turned_away", "requests answered 429 for overload, by cause", "reason")
        self.token_fallbacks = self.counter("token_fallbacks", "requests routed without exact token ids", "reason")
        self.token_chars = self.counter("token_chars", "characters of prompts, by where their ids came from", "source")
        self.token_checks = self.counter(
            "token_checks", "live prompts done again without piece cache or minijinja, by result", "result"
        )
        self.early_partings = self.counter(
            "early_partings", "sampled prompts that part early from one much like them, by likely cause", "cause"
        )
        self.token_parity = self.counter("token_parity", "prompts whose ids were compared with a pod's", "result")
        self.index_fallbacks = self.counter("index_fallbacks", "lookups answered by the local view alone", "reason")
        self.prompt_tokens = self.counter(
            "prompt_tokens", "prompt tokens routed by exact ids, retries included", "policy"
        )
        self.matched_tokens = self.counter(
            "matched_tokens", "of those, tokens predicted to be in the chosen pod's cache", "policy"
        )

        self.control_first_byte_seconds = self.histogram(
            "control_first_byte_seconds",
            "with --control: as first_byte_seconds, of prompts answered without an error, by who served them",
            "arm",
            "policy",
        )
        self.shadow_decisions = self.counter(
            "shadow_decisions",
            "with --shadow: choices that it made too, and whether it chose the same",
            "policy",
            "agrees",
        )
        self.shadow_prompt_tokens = self.counter(
            "shadow_prompt_tokens", "with --shadow: prompt tokens of those choices, where the exact ids are known"
        )
        self.shadow_matched_tokens = self.counter(
            "shadow_matched_tokens",
            "of those, tokens predicted to be in the cache that was chosen, and in the one the shadow would have",
            "policy",
        )

        self.peers = self.gauge("peers", "other routers whose load and choices are known and fresh")
        self.peers_age_seconds = self.gauge(
            "peers_age_seconds", "age of the last message of the one of them heard of longest ago"
        )
        self.peer_messages = self.counter("peer_messages", "messages between routers, by what became of them", "what")

        # -- the fleet ----------------------------------------------------------------------------------------------
        self.pods = self.gauge("pods", "pods known, by whether they may get requests", "state")
        self.discovery_synced = self.gauge("discovery_synced_seconds", "when pods were last listed (Unix time)", "kind")
        self.discovery_restarts = self.counter("discovery_restarts", "discovery loops begun anew", "kind", "reason")

        self.pod_rows = PodRows()
        self.registry.register(self.pod_rows)

        # -- the index ----------------------------------------------------------------------------------------------
        self.index_up = self.gauge("index_up", "1 while the shared index answers in time, 0 while the breaker is open")
        self.index_unattended_workers = self.gauge(
            "index_unattended_workers", "workers that no indexer has kept the shared index for since 10 s or more"
        )
        self.index_lookup_seconds = self.histogram(
            "index_lookup_seconds", "one lookup in the shared index", buckets=LOOKUP_SECONDS
        )
        self.near_cache_blocks = self.gauge(
            "near_cache_blocks", "blocks of hot chains kept in this process for a moment"
        )
        self.near_cache_hits = self.counter("near_cache_hit_blocks", "blocks that a lookup need not ask Redis for")
        self.local_view_blocks = self.gauge("local_view_blocks", "blocks that this router remembers having routed")
        self.kv_sources = self.gauge(
            "kv_sources", "workers whose KV events are followed, by state; silent: wrongly so, see /debug/pods", "state"
        )
        self.kv_blocks = self.gauge("kv_blocks", "blocks that the followed workers hold, by tier", "tier")
        self.kv_events = self.counter("kv_events", "what happened while following KV events", "what")

    def counter(self, name: str, help_text: str, *labels: str) -> Counter:
        """A new counter `warmroute_<name>_total`."""
        return Counter(f"warmroute_{name}", help_text, labels, registry=self.registry)

    def gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        """A new gauge `warmroute_<name>`."""
        return Gauge(f"warmroute_{name}", help_text, labels, registry=self.registry)

    def histogram(self, name: str, help_text: str, *labels: str, buckets: Iterable[float] = SECONDS) -> Histogram:
        """A new histogram `warmroute_<name>`; seconds unless other buckets are given."""
        return Histogram(f"warmroute_{name}", help_text, labels, registry=self.registry, buckets=tuple(buckets))

    def render(self) -> bytes:
        """Prometheus text of everything in the registry."""
        return generate_latest(self.registry)

    def value(self, name: str, **labels: str) -> float:
        """Present value of one sample by its full name, 0.0 when it was never touched. For tests and reports."""
        found = self.registry.get_sample_value(name, labels)
        return 0.0 if found is None else found


__all__ = ["METRICS_CONTENT_TYPE", "Metrics", "access", "setup_logging"]


# -- logging --------------------------------------------------------------------------------------------------------

access = logging.getLogger("warmroute.access")
"""One line a request. Fields are handed over as `extra={"fields": {...}}`."""


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields, enc_hook=str).decode()


class Batched(logging.StreamHandler):  # type: ignore[type-arg]  # generic for type checkers only
    """Writes access lines in batches, at most `delay_s` late; every other line at once, after those before it.

    A write and a flush for each request would cost as much as a third of the request itself.
    """

    def __init__(self, stream: TextIO, *, delay_s: float = 0.1, max_lines: int = 256) -> None:
        super().__init__(stream)
        self._delay_s = delay_s
        self._max_lines = max_lines
        self._lines: list[str] = []
        self._due: asyncio.TimerHandle | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep an access line for the next batch; write anything else now."""
        try:
            self._lines.append(self.format(record))
        except Exception:
            self.handleError(record)
            return
        if record.name != access.name or len(self._lines) >= self._max_lines or not self._later():
            self.flush()

    def _later(self) -> bool:
        """The batch will be written soon; False when there is no loop to do it."""
        if self._due is None:
            try:
                self._due = asyncio.get_running_loop().call_later(self._delay_s, self.flush)
            except RuntimeError:
                return False
        return True

    def flush(self) -> None:
        """Write what is kept. Also called at exit."""
        with self.lock or contextlib.nullcontext():
            if self._due is not None:
                self._due.cancel()
                self._due = None
            if self._lines:
                text = "\n".join(self._lines) + "\n"
                self._lines.clear()
                with contextlib.suppress(OSError, ValueError):  # nobody reads our stderr any more
                    self.stream.write(text)
            super().flush()


class TextLines(logging.Formatter):
    """The same for people: time level logger message key=value ..."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {k}={v}" for k, v in getattr(record, "fields", {}).items())
        line = f"{_timestamp(record.created)} {record.levelname:7} {record.name}: {record.getMessage()}{fields}"
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


def _timestamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"


def setup_logging(*, level: str = "info", form: str = "json") -> None:
    """Send everything to stderr as `form` ("json" or "text"), from `level` up. Replaces what was set up before.

    Libraries' debug lines may quote URLs and headers, so they are never let below info (H15).
    """
    handler = Batched(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Nothing here shows thread, process, task or line of a record, and finding them costs more than formatting it.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # as the logging HOWTO advises under "Optimization"
    root.setLevel(max(logging.INFO, logging.getLevelName(level.upper())))
    logging.getLogger("warmroute").setLevel(level.upper())
    logging.getLogger("router").setLevel(level.upper())
    logging.getLogger("indexer").setLevel(level.upper())
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
