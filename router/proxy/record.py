"""What one request will be remembered by: metrics and one structured access line. No body, no header, no query (H15).

May import: the standard library, router.ops, router.policy (types), router.route (Choice).
"""

from __future__ import annotations

import logging
import time

from prometheus_client import Counter, Histogram

from router.ops import Metrics, access
from router.policy.trial import Arm
from router.route import EXACT_ENDPOINTS, Choice

ROUTES = (
    "/health",
    "/ready",
    "/metrics",
    "/debug/pods",
    "/debug/prefixes",
    "/debug/route",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/v2/embed",
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
)
_KNOWN = frozenset(ROUTES)
PROBES = frozenset({"/health", "/ready"})
"""Asked every few seconds by whoever runs us: worth a line when they fail."""


def route_label(path: str) -> str:
    """A closed set of labels: random paths must not become time series (H72)."""
    if path in _KNOWN:
        return path
    if path.startswith("/v1/responses/"):
        return "/v1/responses/{id}"
    return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"


class Meters:
    """The series of requests, each looked up once: finding a series by its labels costs more than counting in it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._counts: dict[tuple[str, int], Counter] = {}
        self._seconds: dict[str, tuple[Histogram, Histogram]] = {}
        self._arms: dict[tuple[Arm, str], Histogram] = {}

    def arm(self, arm: Arm, policy: str, first_byte_s: float) -> None:
        """A prompt was answered in one of the two arms of --control."""
        series = self._arms.get((arm, policy))
        if series is None:
            series = self._arms[arm, policy] = self._metrics.control_first_byte_seconds.labels(arm, policy)
        series.observe(first_byte_s)

    def count(self, endpoint: str, status: int, duration_s: float, first_byte_s: float | None) -> None:
        """One request has ended. Both labels come from closed sets."""
        counter = self._counts.get((endpoint, status))
        if counter is None:
            counter = self._counts[endpoint, status] = self._metrics.requests.labels(endpoint, str(status))
        counter.inc()
        seconds = self._seconds.get(endpoint)
        if seconds is None:
            seconds = (
                self._metrics.request_seconds.labels(endpoint),
                self._metrics.first_byte_seconds.labels(endpoint),
            )
            self._seconds[endpoint] = seconds
        seconds[0].observe(duration_s)
        if first_byte_s is not None:
            seconds[1].observe(first_byte_s)


class Record:
    """Filled while the request is handled, written once at its end."""

    __slots__ = (
        "_began_s",
        "attempts",
        "bytes_in",
        "bytes_out",
        "choice",
        "client",
        "endpoint",
        "first_byte_s",
        "method",
        "model",
        "note",
        "prompt_tokens",
        "request_id",
        "status",
        "waited_s",
    )

    def __init__(self, *, method: str, path: str, client: str, request_id: str) -> None:
        self._began_s = time.monotonic()
        self.method = method
        self.endpoint = route_label(path)
        self.client = client
        self.request_id = request_id
        self.status = 0
        self.note = ""  # why it ended as it did: a closed set of words
        self.model: str | None = None
        self.prompt_tokens: int | None = None  # None: not known
        self.choice: Choice | None = None
        self.attempts = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.first_byte_s: float | None = None
        self.waited_s: float | None = None  # for room; None: not at all

    def first_byte(self) -> None:
        """The first byte of the reply's body has come."""
        if self.first_byte_s is None:
            self.first_byte_s = time.monotonic() - self._began_s

    def finish(self, meters: Meters) -> None:
        """Count and log."""
        duration_s = time.monotonic() - self._began_s
        meters.count(self.endpoint, self.status, duration_s, self.first_byte_s)
        if (choice := self.choice) is not None and choice.arm is not None and self._answered():
            assert self.first_byte_s is not None
            meters.arm(choice.arm, choice.policy, self.first_byte_s)
        level = logging.DEBUG if self.endpoint in PROBES and self.status < 400 else logging.INFO
        if access.isEnabledFor(level):
            access.log(level, "request", extra={"fields": self._fields(duration_s)})

    def _answered(self) -> bool:
        """A prompt, and it got its answer: errors come early and would make an arm look fast."""
        return self.first_byte_s is not None and self.status < 400 and self.endpoint in EXACT_ENDPOINTS

    def _fields(self, duration_s: float) -> dict[str, object]:
        fields: dict[str, object] = {
            "method": self.method,
            "endpoint": self.endpoint,
            "status": self.status,
            "duration_ms": round(duration_s * 1000, 2),
            "request_id": self.request_id,
            "client": self.client,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }
        if self.first_byte_s is not None:
            fields["ttft_ms"] = round(self.first_byte_s * 1000, 2)
        if self.waited_s is not None:
            fields["waited_ms"] = round(self.waited_s * 1000, 2)
        if self.model is not None:
            fields["model"] = self.model
        if self.prompt_tokens is not None:
            fields["prompt_tokens"] = self.prompt_tokens
        choice = self.choice
        if choice is not None:
            fields |= {
                "pod": choice.name,
                "policy": choice.policy,
                "reason": choice.reason,
                "prompt_tokens": choice.prompt_tokens,
                "matched_tokens": choice.matched_tokens,
                "attempts": self.attempts,
            }
            if choice.arm is not None:
                fields["arm"] = choice.arm
        if self.note:
            fields["note"] = self.note
        return fields
