"""The client port: from a request's head to the exchange that answers it.

Order at the door: pages, key, sizes, body, JSON, model; each failure has its own error object (H17, DESIGN 14).
May import: aiohttp.web, router.door, router.route, router.policy, router.fleet (types), router.proxy.*, router.ops.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import unquote

import msgspec
from aiohttp import web

from router.door import OPEN_PATHS, ApiKeys, Lifecycle
from router.ops import Metrics
from router.policy.retry import RetryBudget
from router.proxy.body import BodyLedger, HeldBody, read_body, too_many
from router.proxy.errors import HttpError
from router.proxy.exchange import CLIENT_GONE, Asked, ConductorPort, Exchange, FleetPort, Parts
from router.proxy.front import ClientGone, Front
from router.proxy.headers import RawHeaders, request_id, value_of
from router.proxy.limits import ProxyLimits
from router.proxy.parse import NOTHING, Parsed, parse, route_request
from router.proxy.place import asking
from router.proxy.record import Meters, Record
from router.proxy.sticky import ResponseHomes
from router.proxy.tenant import salted
from router.proxy.upstream import Upstream
from router.proxy.watch import GoneWatch
from router.waiting import Asking, Waiting

log = logging.getLogger("router.proxy")

Pages = Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse | None]]
"""Health, metrics and debug pages: (request, path) -> reply, or None when the path is none of theirs."""

READY_WITHOUT_KEY = ("ready", "reasons", "pods_known", "pods_ready")

CONTROL_ROUTES = frozenset(
    {
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/sleep",
        "/wake_up",
        "/pause",
        "/resume",
        "/abort_requests",
        "/inference/v1/abort_requests",
        "/collective_rpc",
        "/server_info",
        "/scale_elastic_ep",
        "/start_profile",
        "/stop_profile",
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/finish_weight_update",
        "/update_weights",
        "/update_weight_version",
        "/release_kv_cache_memory",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/fault_tolerance/apply",
    }
)
"""vLLM routes that act on one engine: through a router they would hit a pod by chance, sent by any client."""


class Proxy:
    """Handles every request of the client port."""

    def __init__(self, parts: Parts, *, pages: Pages, keys: ApiKeys, lifecycle: Lifecycle) -> None:
        self._parts = parts
        self._pages = pages
        self._keys = keys
        self._debug = parts.limits.admin_on_main
        forwarded = parts.limits.forward_authorization
        self._authorization = (forwarded if forwarded is not None else not keys) and not parts.limits.pod_api_key
        key = parts.limits.pod_api_key
        self._pod_key = None if key is None else f"Bearer {key}".encode()
        self._bodies = BodyLedger(parts.limits.buffered_bodies_max_bytes)
        self._lifecycle = lifecycle
        self._unpacking = ThreadPoolExecutor(1, thread_name_prefix="inflate")
        self.inflight = 0
        self._meters = Meters(parts.metrics)
        parts.metrics.inflight.set_function(lambda: self.inflight)

    def close(self) -> None:
        """Nothing is handled any more."""
        self._unpacking.shutdown(wait=False, cancel_futures=True)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request, remembered however it ends."""
        target = origin_form(request.raw_path)
        path = target.partition("?")[0]
        if "%" in path:
            path = unquote(path)  # as the pod will: /v1/complet%69ons is no other route
        given_id = request_id(request.raw_headers, os.urandom(16).hex())
        record = Record(
            method=request.method, path=path, client=request.remote or "", request_id=given_id.decode("latin-1")
        )
        self.inflight += 1
        try:
            response = await self._answer(request, target, path, given_id, record)
            record.status = record.status or response.status
        except HttpError as exc:
            response = exc.response(path)
            if "Origin" in request.headers:  # a page's script is to see the error, not a CORS failure
                response.headers["Access-Control-Allow-Origin"] = "*"
            record.status, record.note = exc.status, record.note or exc.code or ""
            response.headers["X-Request-Id"] = record.request_id
        except ConnectionError:
            self._left(record)
            return ClientGone()
        except asyncio.CancelledError:
            self._left(record)
            raise
        except Exception:
            record.status, record.note = 500, "fault"
            raise
        finally:
            self.inflight -= 1
            record.finish(self._meters)
        if self._lifecycle.draining:
            response.force_close()
        return response

    def _left(self, record: Record) -> None:
        record.status = CLIENT_GONE
        record.note = record.note or "client_gone"
        self._parts.metrics.client_gone.inc()

    async def _answer(
        self, request: web.BaseRequest, target: str, path: str, given_id: bytes, record: Record
    ) -> web.StreamResponse:
        headers = request.raw_headers
        if path not in OPEN_PATHS and not self._keys.admits(headers) and not is_preflight(request):
            raise HttpError(401, "A valid API key is needed: Authorization: Bearer KEY.", close=request.body_exists)
        if self._debug or not path.startswith("/debug/"):
            page = await self._pages(request, path)
            if page is not None:
                return page if path != "/ready" or self._keys.admits(headers) else without_details(page)
        if path == "/v1/models" or path.startswith("/v1/models/"):
            if request.method in ("GET", "HEAD"):
                return self._models(path.rstrip("/"), for_page="Origin" in request.headers)
        elif path.startswith("/debug/"):
            raise HttpError(404, "Debug pages are on the admin port (or here with --admin-on-main).", close=True)
        if path in CONTROL_ROUTES and not self._parts.limits.forward_control_routes:
            raise HttpError(403, "This route acts on one engine: call the pod itself.", close=request.body_exists)
        return await self._forward(request, target, path, given_id, record)

    async def _forward(
        self, request: web.BaseRequest, target: str, path: str, given_id: bytes, record: Record
    ) -> web.StreamResponse:
        limits = self._parts.limits
        policy = self._policy(request.raw_headers)
        with self._bodies.hold() as held:
            held.body = await read_body(request, limits, held)
            record.bytes_in = len(held.body or b"")
            exchange = await self._prepare(request, target, path, given_id, policy, held, record)
            return await exchange.run()

    async def _prepare(
        self,
        request: web.BaseRequest,
        target: str,
        path: str,
        given_id: bytes,
        policy: str | None,
        held: HeldBody,
        record: Record,
    ) -> Exchange:
        """Understand the body. Apart from the exchange, so that no variable keeps the body's text while it streams."""
        parts, limits = self._parts, self._parts.limits
        parsed = NOTHING
        if held.body or request.method == "POST":
            read = partial(
                parse,
                path,
                request.raw_headers if held.body else (),
                held.body or b"",
                inflate_max_bytes=limits.inflate_max_bytes,
                form_search_max_bytes=limits.multipart_search_max_bytes,
                thorough=limits.tenant_salt,
            )
            packed = held.body is not None and "Content-Encoding" in request.headers
            # A small body may become a long text. A thread of its own: all others may be waiting for name servers.
            parsed = await asyncio.get_running_loop().run_in_executor(self._unpacking, read) if packed else read()
        await self._check_model(parsed)
        record.model = parsed.model
        headers: RawHeaders = request.raw_headers
        if limits.tenant_salt and held.body and path not in CONTROL_ROUTES:
            parsed, headers = self._salted(path, headers, parsed, held)
        asked = self._asked(target, path, headers, given_id, parsed)
        route = route_request(path, parsed, body_bytes=record.bytes_in, policy=policy)
        prepared = await parts.conductor.prepare(route)
        return Exchange(parts, request, asked, prepared, held, record)

    def _salted(self, path: str, headers: RawHeaders, parsed: Parsed, held: HeldBody) -> tuple[Parsed, RawHeaders]:
        """With --tenant-salt: the body gets its tenant's salt, and routing goes by the same one."""
        limits, counted = self._parts.limits, self._parts.metrics.tenant_salts
        assert limits.tenant_header is not None
        try:
            marked = salted(path, headers, parsed, name=limits.tenant_header.encode(), seed=limits.key_seed)
        except HttpError:
            counted.labels("refused").inc()
            raise
        if marked is None:
            counted.labels("no_json").inc()
            return parsed, headers
        if not held.replace(marked.body):
            raise too_many(limits)
        counted.labels("put").inc()
        return marked.parsed, marked.headers

    def _asked(self, target: str, path: str, headers: RawHeaders, given_id: bytes, parsed: Parsed) -> Asked:
        stored = parsed.previous_response_id  # vLLM looks for it before anything else: a 404 has cost nothing
        if path.startswith("/v1/responses/") and path.count("/") >= 3:
            stored = path.split("/")[3]
        pod = self._parts.homes.home(stored) if stored else None
        only = None
        if pod is not None:
            home = next((p for p in self._parts.fleet.pods() if p.spec.identity == pod and p.serving), None)
            only = frozenset(home.workers) if home is not None else None
        return Asked(
            endpoint=path,
            target=target,
            headers=headers,
            request_id=given_id,
            authorization=self._authorization,
            pod_key=self._pod_key,
            only=only,
            walk=stored is not None and path.startswith("/v1/responses") and only is None,
            asking=self._place(headers, path, parsed, stored=stored is not None),
        )

    def _place(self, headers: RawHeaders, path: str, parsed: Parsed, *, stored: bool) -> Asking | None:
        """None: it does not wait. A stored response is where it is: there is no choice to put off."""
        if self._parts.waiting is None or stored:
            return None
        return asking(path, headers, parsed, tenant_header=self._parts.limits.tenant_header)

    def _policy(self, headers: RawHeaders) -> str | None:
        if not self._parts.limits.allow_policy_header:
            return None
        given = value_of(headers, b"x-warmroute-policy")
        if not given:
            return None
        name = given.decode("latin-1")
        if not self._parts.conductor.has_policy(name):
            raise HttpError(
                400,
                "x-warmroute-policy names no policy; docs/policies.md lists them.",
                code="unknown_policy",
                close=True,
            )
        return name

    async def _check_model(self, parsed: Parsed) -> None:
        fleet, model = self._parts.fleet, parsed.model
        if model is None or fleet.serves(model):
            return
        if not fleet.heard_models():
            raise self._no_models_yet()
        if await fleet.serves_by_now(model):
            return
        raise not_served(model)

    def _no_models_yet(self) -> HttpError:
        return HttpError(
            503, "No pod has reported its models yet; try again.", retry_after_s=self._parts.limits.retry_after_s
        )

    def _models(self, path: str, *, for_page: bool) -> web.StreamResponse:
        """GET /v1/models, the union, and /v1/models/{id} (H76). `for_page`: any page in a browser may ask."""
        fleet = self._parts.fleet
        if not fleet.heard_models():
            raise self._no_models_yet()
        listed = fleet.model_list()
        if path == "/v1/models":
            body: object = {"object": "list", "data": listed}
        else:
            name = path.removeprefix("/v1/models/")
            body = next((entry for entry in listed if entry.get("id") == name), None)
            if body is None:
                raise not_served(name)
        shared = {"Access-Control-Allow-Origin": "*"} if for_page else None
        return web.Response(body=msgspec.json.encode(body), content_type="application/json", headers=shared)


def not_served(model: str) -> HttpError:
    """vLLM's own code for it."""
    message = f"The model `{model[:200]}` is not served here; GET /v1/models lists what is."
    return HttpError(404, message, code="model_not_found", param="model")


def without_details(page: web.StreamResponse) -> web.StreamResponse:
    """/ready for somebody without a key: whether and why not, but no names, addresses or paths."""
    assert isinstance(page, web.Response)
    told = msgspec.json.decode(page.body or b"{}")  # type: ignore[arg-type]
    page.body = msgspec.json.encode({name: told[name] for name in READY_WITHOUT_KEY if name in told})
    return page


def is_preflight(request: web.BaseRequest) -> bool:
    """A browser asks whether a page may send a request. It never sends a key with this; vLLM asks for none either."""
    asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    return asks and not request.body_exists


def origin_form(target: str) -> str:
    """Path and query of a request target; a proxy-style absolute one loses its scheme and authority."""
    if target.startswith("/"):
        return target
    _, scheme, rest = target.partition("://")
    if scheme:
        slash = rest.find("/")
        return rest[slash:] if slash >= 0 else "/"
    return target


class ProxyApp:
    """The client port, ready to be served by `front.listen`, and what must be closed with it."""

    def __init__(self, proxy: Proxy, front: Front, parts: Parts) -> None:
        self.proxy = proxy
        self.front = front
        self.parts = parts

    async def close(self) -> None:
        """Stop helpers; call it after the listeners were closed."""
        await self.parts.gone.close()
        self.proxy.close()


def build_app(
    conductor: ConductorPort,
    fleet: FleetPort,
    upstream: Upstream,
    limits: ProxyLimits,
    metrics: Metrics,
    *,
    pages: Pages,
    keys: ApiKeys | None = None,
    lifecycle: Lifecycle | None = None,
) -> ProxyApp:
    """Everything of the client port but the socket."""
    parts = Parts(
        conductor=conductor,
        fleet=fleet,
        upstream=upstream,
        limits=limits,
        metrics=metrics,
        budget=RetryBudget(ratio=limits.retry_budget_ratio, reserve_retries=limits.retry_reserve),
        gone=GoneWatch(fleet.gone, limit_s=limits.gone_limit_s),
        homes=ResponseHomes(),
        waiting=Waiting(conductor, limits.wait_rules, metrics) if limits.overload_prefill_s else None,
    )
    proxy = Proxy(parts, pages=pages, keys=keys or ApiKeys(), lifecycle=lifecycle or Lifecycle())
    return ProxyApp(proxy, Front(proxy.handle, limits, metrics), parts)
