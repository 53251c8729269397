"""A stand-in for the Kubernetes API server: list and watch over its real wire protocol, and its ways of failing.

It keeps pods, endpoint slices and services with a growing resourceVersion and a log of changes, pages lists, sends
bookmarks, honours label selectors (an object that leaves a selector is told as DELETED, as the real one does), answers
410 for history it has compacted away, and serves what `kubectl` asks first. It is not a cluster: nothing runs in it.
"""

import asyncio
import base64
import copy
import json
import ssl
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

Json = dict[str, Any]

RESOURCES = {
    "pods": ("/api/v1", "v1", "Pod"),
    "services": ("/api/v1", "v1", "Service"),
    "endpointslices": ("/apis/discovery.k8s.io/v1", "discovery.k8s.io/v1", "EndpointSlice"),
}


class KubeApi:
    """Start it, put objects into it, point a kubeconfig at it, and break it."""

    def __init__(self) -> None:
        self.port = 0
        self.store: dict[str, dict[tuple[str, str], Json]] = {kind: {} for kind in RESOURCES}
        self.version = 100
        self.compacted = 0
        self.log: list[tuple[int, str, str, Json, Json | None]] = []  # version, kind, type, object, the one before
        self.valid_tokens: set[str] | None = None  # None: everybody may
        self.silent = False  # open watches send nothing, not even their end
        self.blind_watch = False  # watches send every event of the namespace, whatever its labels
        self.gone_in_stream = True  # 410 as an ERROR event in a 200 stream, else as an HTTP status
        self.forbidden: set[str] = set()  # resources that answer 403
        self.next_replies: deque[Callable[[web.Request], Any]] = deque()  # scripted answers, each used once
        self.bookmark_s = 1.0
        self.page_limit: int | None = None  # smaller than what was asked for
        self.requests: list[tuple[str, dict[str, str], str]] = []  # path, query, authorization
        self._watchers: dict[int, web.Request] = {}
        self._runner: web.AppRunner | None = None

    # ---- life ----

    async def start(self, *, certificate: Path | None = None, key: Path | None = None) -> None:
        """Listens, after the first time on the same port again; with TLS if given a certificate."""
        tls = None
        if certificate is not None:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(certificate, key)
        app = web.Application()
        app.router.add_get("/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True, ssl_context=tls)
        await site.start()
        self.port = site.port

    async def stop(self) -> None:
        """Away: connections are cut, new ones refused."""
        self.cut_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kubeconfig(self, directory: Path, *, token: str = "first", namespace: str = "serving") -> Path:
        """Writes a kubeconfig with a token file beside it; `rotate` rewrites the latter."""
        (directory / "token").write_text(token + "\n")
        path = directory / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "stand-in",
            "clusters": [{"name": "stand-in", "cluster": {"server": self.url}}],
            "users": [{"name": "router", "user": {"tokenFile": "token"}}],
            "contexts": [
                {"name": "stand-in", "context": {"cluster": "stand-in", "user": "router", "namespace": namespace}}
            ],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    # ---- what happens in the cluster ----

    def put(self, obj: Json) -> Json:
        """Adds or changes an object and tells the watchers."""
        kind = obj["kind"].lower() + "s"
        obj = copy.deepcopy(obj)
        meta = obj["metadata"]
        key = (meta["namespace"], meta["name"])
        before = self.store[kind].get(key)
        self.version += 1
        meta["resourceVersion"] = str(self.version)
        meta.setdefault("uid", before["metadata"]["uid"] if before else str(uuid.uuid4()))
        self.store[kind][key] = obj
        self._tell(kind, "MODIFIED" if before else "ADDED", obj, before)
        return obj

    def delete(self, obj: Json, *, told: bool = True) -> None:
        """Removes it; with `told=False` no watch ever hears of it, only the next list shows it."""
        kind = obj["kind"].lower() + "s"
        before = self.store[kind].pop((obj["metadata"]["namespace"], obj["metadata"]["name"]))
        self.version += 1
        last = copy.deepcopy(before)
        last["metadata"]["resourceVersion"] = str(self.version)
        if told:
            self._tell(kind, "DELETED", last, before)

    def compact(self) -> None:
        """Forgets the history: whoever asks for something older gets 410."""
        self.log.clear()
        self.compacted = self.version

    def cut_watches(self) -> None:
        """Breaks the connections of all open watches, without an end."""
        for request in list(self._watchers.values()):
            if request.transport is not None:
                request.transport.abort()

    def say_in_watches(self, event: Json) -> None:
        """Puts an event of the test's own into every open watch."""
        self.version += 1
        self.log.append((self.version, "*", event["type"], event["object"], None))

    @property
    def watching(self) -> int:
        return len(self._watchers)

    def asked(self, *, watch: bool, kind: str = "pods") -> int:
        """How many lists or watches were asked for."""
        return sum(1 for path, query, _ in self.requests if path.endswith("/" + kind) and ("watch" in query) == watch)

    # ---- the wire ----

    def _tell(self, kind: str, event: str, obj: Json, before: Json | None) -> None:
        self.log.append((self.version, kind, event, copy.deepcopy(obj), before))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path, query = request.path, dict(request.query)
        self.requests.append((path, query, request.headers.get("Authorization", "")))
        if self.valid_tokens is not None:
            token = request.headers.get("Authorization", "").removeprefix("Bearer ").removeprefix("bearer ")
            if token not in self.valid_tokens:
                return _status(401, "Unauthorized", "Unauthorized")
        if self.next_replies:
            return await self.next_replies.popleft()(request)
        if (known := _DISCOVERY.get(path.rstrip("/"))) is not None:
            return web.json_response(known)
        for kind, (prefix, _, _) in RESOURCES.items():
            parts = path.removeprefix(prefix + "/namespaces/").split("/")
            if path.startswith(prefix + "/namespaces/") and len(parts) in (2, 3) and parts[1] == kind:
                if kind in self.forbidden:
                    return _status(403, "Forbidden", f"{kind} is forbidden: User cannot list resource {kind}")
                if len(parts) == 3:
                    found = self.store[kind].get((parts[0], parts[2]))
                    return web.json_response(found) if found else _status(404, "NotFound", f"{parts[2]} not found")
                if query.get("watch") in ("true", "1"):
                    return await self._watch(request, kind, parts[0])
                return self._list(kind, parts[0], query)
        return _status(404, "NotFound", "the server could not find the requested resource")

    def _list(self, kind: str, namespace: str, query: dict[str, str]) -> web.Response:
        _, api_version, singular = RESOURCES[kind]
        chosen = [
            obj
            for (ns, _), obj in sorted(self.store[kind].items())
            if ns == namespace and _selected(obj, query.get("labelSelector", ""))
        ]
        start, version = 0, self.version
        if token := query.get("continue"):
            version, start = json.loads(base64.b64decode(token))
            if version < self.compacted:
                return _status(410, "Expired", "The provided continue parameter is too old")
        limit = int(query.get("limit", 0)) or len(chosen) or 1
        limit = min(limit, self.page_limit or limit)
        page = chosen[start : start + limit]
        more = start + limit < len(chosen)
        meta: Json = {"resourceVersion": str(version)}
        if more:
            meta["continue"] = base64.b64encode(json.dumps([version, start + limit]).encode()).decode()
        items = page or None if kind == "pods" else page  # Go's nil slice, as some servers write it
        return web.json_response(
            {"kind": singular + "List", "apiVersion": api_version, "metadata": meta, "items": items}
        )

    async def _watch(self, request: web.Request, kind: str, namespace: str) -> web.StreamResponse:
        query = request.query
        since = int(query.get("resourceVersion") or 0)
        if 0 < since < self.compacted:
            if not self.gone_in_stream:
                return _status(410, "Expired", f"too old resource version: {since} ({self.compacted})")
            return web.json_response(
                {"type": "ERROR", "object": _status_body(410, "Expired", f"too old resource version: {since}")}
            )
        response_stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response_stream.prepare(request)
        self._watchers[id(request)] = request
        try:
            async for event in self._events(kind, namespace, query.get("labelSelector", ""), since, request):
                await response_stream.write(json.dumps(event).encode() + b"\n")
        except ConnectionError:
            pass
        finally:
            self._watchers.pop(id(request), None)
        return response_stream

    async def _events(
        self, kind: str, namespace: str, selector: str, since: int, request: web.Request
    ) -> AsyncIterator[Json]:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + float(request.query.get("timeoutSeconds") or 1800)
        bookmarks, bookmark_at_s = request.query.get("allowWatchBookmarks") == "true", loop.time() + self.bookmark_s
        if since == 0:
            for (ns, _), obj in sorted(self.store[kind].items()):
                if ns == namespace and _selected(obj, selector):
                    yield {"type": "ADDED", "object": obj}
            since = self.version
        while request.transport is not None and not request.transport.is_closing():
            if self.silent:
                await asyncio.sleep(0.05)
                continue
            for version, about, event, obj, before in [entry for entry in self.log if entry[0] > since]:
                since = version
                if about == "*":
                    yield {"type": event, "object": obj}
                elif about == kind and obj["metadata"]["namespace"] == namespace:
                    told = event if self.blind_watch else _as_selected(event, obj, before, selector)
                    if told is not None:
                        yield {"type": told, "object": obj}
            if loop.time() >= end_s:
                return
            if bookmarks and loop.time() >= bookmark_at_s:
                bookmark_at_s = loop.time() + self.bookmark_s
                _, api_version, singular = RESOURCES[kind]
                meta = {"resourceVersion": str(since), "creationTimestamp": None}
                yield {"type": "BOOKMARK", "object": {"kind": singular, "apiVersion": api_version, "metadata": meta}}
            await asyncio.sleep(0.02)


@asynccontextmanager
async def kube_api() -> AsyncIterator[KubeApi]:
    """A running stand-in."""
    api = KubeApi()
    await api.start()
    try:
        yield api
    finally:
        await api.stop()


# ---- objects ----


def pod(
    name: str,
    ip: str | None = "10.0.0.1",
    *,
    namespace: str = "serving",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    uid: str | None = None,
    ready: bool = True,
    phase: str = "Running",
    deleting: bool = False,
    restarts: int = 0,
    started_at: str = "2026-01-01T00:00:00Z",
    created_at: str = "2026-01-01T00:00:00Z",
    ports: list[Json] | None = None,
) -> Json:
    """A vLLM pod as an API server shows it, as far as anybody here looks."""
    meta: Json = {
        "name": name,
        "namespace": namespace,
        "labels": {"app": "vllm"} if labels is None else labels,
        "creationTimestamp": created_at,
    }
    if uid is not None:
        meta["uid"] = uid
    if annotations:
        meta["annotations"] = annotations
    if deleting:
        meta["deletionTimestamp"] = "2026-01-01T01:00:00Z"
        meta["deletionGracePeriodSeconds"] = 30
    status: Json = {
        "phase": phase,
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        "containerStatuses": [
            {
                "name": "vllm",
                "ready": ready,
                "restartCount": restarts,
                "containerID": f"containerd://{name}-{restarts}",
                "state": {"running": {"startedAt": started_at}},
            }
        ],
    }
    if ip is not None:
        status["podIP"], status["podIPs"] = ip, [{"ip": ip}]
    ports = [{"name": "http", "containerPort": 8000, "protocol": "TCP"}] if ports is None else ports
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": meta,
        "spec": {"containers": [{"name": "vllm", "image": "vllm", "ports": ports}]},
        "status": status,
    }


def endpoint(
    of: Json, *, ready: bool | None = True, terminating: bool | None = None, address: str | None = None
) -> Json:
    """One endpoint of a slice, for a pod that was put into the stand-in."""
    conditions: Json = {}
    if ready is not None:
        conditions["ready"] = conditions["serving"] = ready
    if terminating is not None:
        conditions["terminating"] = terminating
    return {
        "addresses": [address or of["status"]["podIP"]],
        "conditions": conditions,
        "targetRef": {
            "kind": "Pod",
            "namespace": of["metadata"]["namespace"],
            "name": of["metadata"]["name"],
            "uid": of["metadata"]["uid"],
        },
    }


def endpoint_slice(
    name: str, endpoints: list[Json] | None, *, service: str = "vllm", address_type: str = "IPv4", port: int = 8000
) -> Json:
    """A slice of a Service's endpoints."""
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"name": name, "namespace": "serving", "labels": {"kubernetes.io/service-name": service}},
        "addressType": address_type,
        "endpoints": endpoints,
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
    }


def service(name: str = "vllm", selector: dict[str, str] | None = None) -> Json:
    """A Service that selects pods."""
    return {
        "kind": "Service",
        "apiVersion": "v1",
        "metadata": {"name": name, "namespace": "serving"},
        "spec": {"selector": {"app": "vllm"} if selector is None else selector, "ports": [{"port": 8000}]},
    }


# ---- scripted answers ----


async def html(request: web.Request) -> web.Response:
    """What a proxy in between says."""
    return web.Response(text="<html>oops</html>", content_type="text/html")


async def unavailable(request: web.Request) -> web.Response:
    """What an API server says while it starts."""
    return _status(503, "ServiceUnavailable", "the server is currently unable to handle the request")


async def no_version(request: web.Request) -> web.Response:
    """A list without resourceVersion."""
    return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": []})


# ---- helpers ----


def _selected(obj: Json, selector: str) -> bool:
    labels = obj["metadata"].get("labels") or {}
    for part in filter(None, selector.split(",")):
        if "!=" in part:
            key, value = part.split("!=")
            fits = labels.get(key.strip()) != value.strip()
        elif "=" in part:
            key, value = part.replace("==", "=").split("=")
            fits = labels.get(key.strip()) == value.strip()
        else:
            fits = part.strip() in labels
        if not fits:
            return False
    return True


def _as_selected(event: str, obj: Json, before: Json | None, selector: str) -> str | None:
    was = before is not None and _selected(before, selector)
    is_now = event != "DELETED" and _selected(obj, selector)
    if is_now:
        return "MODIFIED" if was else "ADDED"
    return "DELETED" if was else None


def _status_body(code: int, reason: str, message: str) -> Json:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def _status(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(_status_body(code, reason, message), status=code)


def _resource(name: str, kind: str) -> Json:
    return {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get", "list", "watch"]}


_SLICES = {"groupVersion": "discovery.k8s.io/v1", "version": "v1"}
_DISCOVERY: dict[str, Json] = {
    "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.1"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [{"name": "discovery.k8s.io", "versions": [_SLICES], "preferredVersion": _SLICES}],
    },
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [_resource("pods", "Pod"), _resource("services", "Service")],
    },
    "/apis/discovery.k8s.io/v1": {
        "kind": "APIResourceList",
        "groupVersion": "discovery.k8s.io/v1",
        "resources": [_resource("endpointslices", "EndpointSlice")],
    },
}
