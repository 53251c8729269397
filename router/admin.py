"""Health, readiness, metrics and debug pages: on the admin port all of them, on the client port what DESIGN 14 says.

May import: aiohttp.web, router.door, router.ops, router.route, router.fleet.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from router.door import OPEN_PATHS, ApiKeys, Lifecycle, Unusable, error_object
from router.ops import METRICS_CONTENT_TYPE, Metrics
from router.route import RouteRequest

log = logging.getLogger("router.admin")

EXPLAIN_MAX_BYTES = 64 << 20


class FleetShown(Protocol):
    """What is needed of router.fleet.Fleet."""

    def status(self) -> list[dict[str, Any]]: ...
    def pods(self) -> Any: ...


class Explains(Protocol):
    """What is needed of router.route.Conductor."""

    async def explain(self, request: RouteRequest) -> dict[str, Any]: ...
    def has_policy(self, name: str) -> bool: ...


ReadRequest = Callable[[str | None, Sequence[tuple[bytes, bytes]], bytes], RouteRequest]
"""(endpoint if given, headers, body) -> what the conductor is asked. Raises Unusable with the cure."""
Details = Callable[[], dict[str, Any]]
MetricsPage = Callable[[], Awaitable[bytes]]


class AdminPages:
    """The pages, by path. `fleet` and `explain` may be absent (the indexer has no conductor)."""

    def __init__(
        self,
        *,
        metrics: Metrics,
        fleet: FleetShown,
        lifecycle: Lifecycle,
        conductor: Explains | None = None,
        read_request: ReadRequest | None = None,
        details: Details = dict,
        not_yet: Callable[[], list[str]] = list,
        prefixes: Details | None = None,
        metrics_page: MetricsPage | None = None,
    ) -> None:
        self._metrics = metrics
        self._fleet = fleet
        self._lifecycle = lifecycle
        self._conductor = conductor
        self._read_request = read_request
        self._details = details
        self._not_yet = not_yet
        self._prefixes = prefixes
        self._metrics_page = metrics_page

    async def __call__(self, request: web.BaseRequest, path: str) -> web.StreamResponse | None:
        """The page at `path`, or None when there is none. Does not look at keys."""
        method = "GET" if request.method == "HEAD" else request.method
        match method, path:
            case "GET", "/health":
                return _json({"status": "ok"})
            case "GET", "/ready":
                return self._ready(only_self=request.query.get("scope") == "self")
            case "GET", "/metrics":
                page = self._metrics.render() if self._metrics_page is None else await self._metrics_page()
                return web.Response(body=page, headers={"Content-Type": METRICS_CONTENT_TYPE})
            case "GET", "/debug/pods":
                return _json({"pods": self._fleet.status(), **self._details()})
            case "GET", "/debug/prefixes" if self._prefixes is not None:
                return _json(self._prefixes())
            case "POST", "/debug/route" if self._conductor is not None:
                return await self._explain(request)
        allowed = self.paths().get(path)
        return None if allowed is None else _error(405, f"{path} takes {allowed}.", allow=allowed)

    def paths(self) -> dict[str, str]:
        """The pages that there are, and what each is asked by."""
        pages = dict.fromkeys(("/health", "/ready", "/metrics", "/debug/pods"), "GET")
        if self._prefixes is not None:
            pages["/debug/prefixes"] = "GET"
        if self._conductor is not None:
            pages["/debug/route"] = "POST"
        return pages

    def _ready(self, *, only_self: bool) -> web.Response:
        """Can requests be served? `?scope=self`: is this process itself up (what a chart probes)?"""
        phase = self._lifecycle.phase
        pods = self._fleet.status()
        serving = sum(1 for p in pods if p.get("ready"))
        reasons: list[str] = [] if phase == "serving" else [phase]
        if not only_self and not serving:
            reasons.append("no_pod_ready" if pods else "no_pods")
        if not only_self:
            reasons += self._not_yet()
        body = {
            "ready": not reasons,
            "reasons": reasons,
            "pods_known": len(pods),
            "pods_ready": serving,
            "pods_not_ready": {p["pod"]: p.get("reason") for p in pods if not p.get("ready")},
            **self._details(),
        }
        response = _json(body, status=503 if reasons else 200)
        if reasons:
            response.headers["Retry-After"] = "1"
        return response

    async def _explain(self, request: web.BaseRequest) -> web.Response:
        assert self._conductor is not None
        assert self._read_request is not None
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > EXPLAIN_MAX_BYTES:
                return _error(413, f"The body is larger than {EXPLAIN_MAX_BYTES} bytes.")
        try:
            asked = self._read_request(request.query.get("endpoint"), request.raw_headers, bytes(body))
        except Unusable as exc:
            return _error(400, str(exc), code=exc.code, param=exc.param)
        if asked.policy is not None and not self._conductor.has_policy(asked.policy):
            says = "x-warmroute-policy names no policy; docs/policies.md lists them."
            return _error(400, says, code="unknown_policy")
        return _json(await self._conductor.explain(asked))


def build_admin_app(pages: AdminPages, *, keys: ApiKeys | None = None) -> web.Application:
    """The admin port: every page, and a 404 for the rest."""
    admitted = keys or ApiKeys()

    async def handle(request: web.Request) -> web.StreamResponse:
        path = request.path
        if path not in OPEN_PATHS and not admitted.admits(request.raw_headers):
            return _error(401, "A valid API key is needed: Authorization: Bearer KEY.")
        try:
            page = await pages(request, path)
        except ConnectionError:
            raise
        except Exception:
            log.exception("fault in an admin page")
            return _error(500, "The router failed; this is its fault, not the request's.")
        if page is not None:
            return page
        there = ", ".join(name if method == "GET" else f"{method} {name}" for name, method in pages.paths().items())
        return _error(404, f"No such page; there are {there}.")

    app = web.Application(client_max_size=EXPLAIN_MAX_BYTES)
    app.router.add_route("*", "/{path:.*}", handle)
    return app


def _json(body: object, *, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body, enc_hook=str), content_type="application/json")


def _error(
    status: int, message: str, *, code: str | None = None, param: str | None = None, allow: str | None = None
) -> web.Response:
    body = error_object(status, message, code=code, param=param)
    response = web.Response(status=status, body=body, content_type="application/json")
    if allow is not None:
        response.headers["Allow"] = allow
    return response
