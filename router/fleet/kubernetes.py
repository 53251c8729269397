"""Pods of a Kubernetes namespace, by label selector or as endpoints of a Service: list, watch, for ever again.

Every loop begins with a full list, lasts a minute at most and reads the credentials anew. So whatever goes wrong (a
missed deletion, a watch that has gone silent, a rotated token, 410 Gone) is over within that minute, by the same few
lines that run all day, and not by a special case that runs once a year. The last known fleet is kept while the API
server is away. What the objects mean is decided in k8s_pods.
May import: the standard library, aiohttp, msgspec, router.fleet.{discovery,k8s_*,state}.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from router.core.types import Clock
from router.fleet.discovery import DiscoveryStatus, Observer, OnPods, RestartReason, Unobserved
from router.fleet.k8s_api import ApiError, Credentials, CredentialsError, KubeApi
from router.fleet.k8s_objects import (
    EndpointSlice,
    KubeObject,
    KubePod,
    Selector,
    Service,
    Status,
    WatchEvent,
    parse_selector,
)
from router.fleet.k8s_pods import Found, Ports, pods_by_selector, pods_by_service
from router.fleet.state import PodSpec

log = logging.getLogger(__name__)

Object = TypeVar("Object", bound=KubeObject)


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How long a watch lives and how soon a failure is tried again. Each loop takes a random share of each."""

    watch_life_s: int = 60  # with the grace also the limit for a silent watch and for a used-up token
    watch_grace_s: float = 5.0  # what the server may take to end it
    retry_first_s: float = 0.5
    retry_most_s: float = 8.0  # low, since a list of one namespace is cheap, and a fleet must come back in 10 s
    proven_s: float = 1.0  # a watch that lived this long owes no back-off

    def life_s(self, chance: random.Random) -> int:
        """Spread, or all replicas would list at the same second."""
        return max(1, round(self.watch_life_s * chance.uniform(0.75, 1.0)))

    def retry_s(self, failures: int, chance: random.Random) -> float:
        """0 after success, then doubling up to the most."""
        if failures == 0:
            return 0.0
        return chance.uniform(0.5, 1.0) * min(self.retry_most_s, self.retry_first_s * 2.0 ** min(failures - 1, 20))


class Query(msgspec.Struct, frozen=True):
    """What a reflector lists and watches."""

    path: str
    selector: Selector
    selector_text: str


class Reflector(Generic[Object]):
    """Keeps `objects` equal to what the API server has; tells `on_change` after every change."""

    def __init__(
        self,
        *,
        kind: str,
        of: type[Object],
        api: KubeApi,
        query: Callable[[KubeApi], Awaitable[Query]],
        on_change: Callable[[], None],
        observer: Observer,
        pace: Pace,
        chance: random.Random,
        clock: Clock,
    ) -> None:
        self.kind = kind
        self.objects: Mapping[str, Object] = {}
        self.synced_at_s: float | None = None
        self.tried = False  # at least one list has worked or failed
        self.restarts = 0
        self.last_error: str | None = None
        self._listed_at_s: float | None = None
        self._of, self._api, self._query, self._on_change = of, api, query, on_change
        self._observer, self._pace, self._chance, self._clock = observer, pace, chance, clock

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        try:
            while True:
                self._listed_at_s = None
                try:
                    reason = await self._list_and_watch()
                    good = True
                except Exception as exc:  # H25: whatever it is, it must not end the watching
                    reason, good = self._note(exc), False
                failures = (0 if good else 1) if self._proven() else failures + 1
                self.restarts += reason != "ended"
                self._observer.restarted(self.kind, reason)
                await asyncio.sleep(self._pace.retry_s(failures, self._chance))
        finally:
            await self._api.close()

    def _proven(self) -> bool:
        return self._listed_at_s is not None and self._clock() - self._listed_at_s >= self._pace.proven_s

    async def _list_and_watch(self) -> RestartReason:
        await self._api.refresh()
        query = await self._query(self._api)
        labels = {"labelSelector": query.selector_text}
        listed: dict[str, Object] = {}
        version: str | int | None = None
        async for page in self._api.pages(query.path, labels):
            version = page.metadata.resource_version
            for raw in page.items or ():
                new = self._decode(raw)
                if new is not None and query.selector.matches(new.metadata.labels):
                    listed[new.metadata.key] = new
        self.objects = listed
        self.last_error = None
        self._heard()
        self._listed_at_s = self._clock()
        self._changed()
        life_s = self._pace.life_s(self._chance)
        watch = self._api.watch(query.path, labels, version, life_s=life_s, limit_s=life_s + self._pace.watch_grace_s)
        async with contextlib.aclosing(watch) as lines:
            try:
                async for line in lines:
                    self._receive(msgspec.json.decode(line, type=WatchEvent), query)
            except TimeoutError:
                log.info("the watch of %s was silent past its end; listing anew", self.kind)
                return "timeout"
        return "ended"

    def _receive(self, event: WatchEvent, query: Query) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=Status)
            raise ApiError(status.code or 0, status.message or status.reason or "error inside the watch")
        self._heard()
        if event.type not in ("ADDED", "MODIFIED", "DELETED"):
            return  # BOOKMARK, or something that is newer than we are
        new = self._decode(event.object)
        if new is None:
            return
        key, objects = new.metadata.key, dict(self.objects)
        if event.type != "DELETED" and query.selector.matches(new.metadata.labels):
            objects[key] = new
        elif key in objects and new.metadata.uid in ("", objects[key].metadata.uid):
            del objects[key]
        self.objects = objects
        self._changed()

    def _decode(self, raw: msgspec.Raw) -> Object | None:
        """None for an object that is not as the API promises: it costs only itself, not the watch."""
        try:
            return msgspec.json.decode(raw, type=self._of)
        except msgspec.DecodeError as exc:
            log.warning("one of the %s cannot be read and is left out: %s", self.kind, exc)
            return None

    def _heard(self) -> None:
        self.tried, self.synced_at_s = True, self._clock()
        self._observer.synced(self.kind)

    def _changed(self) -> None:
        try:
            self._on_change()
        except Exception:  # H25: the listener's fault is not the watch's
            log.exception("the fleet could not take the list of %s; it is told again with the next change", self.kind)

    def _note(self, exc: Exception) -> RestartReason:
        first_try, self.tried = not self.tried, True
        reason, text = explain(exc, self.kind)
        if text != self.last_error:
            self.last_error = text
            log.warning(
                "Kubernetes %s: %s; the last known fleet is kept, trying again",
                self.kind,
                text,
                exc_info=exc if reason == "bug" else None,
            )
        if first_try:
            self._changed()
        return reason


def explain(exc: Exception, kind: str) -> tuple[RestartReason, str]:
    """Why a loop ended: a metric label, and a line for the operator that quotes no URL."""
    match exc:
        case ApiError(status=410):
            return "gone", f"{exc} (the history we asked for is gone: listing anew)"
        case ApiError(status=401):
            return "unauthorized", f"{exc} (the token is refused; it is read again from its file before each try)"
        case ApiError(status=403):
            return "forbidden", f"{exc} (the ServiceAccount needs get, list and watch on {kind} in this namespace)"
        case ApiError():
            return "http", str(exc)
        case CredentialsError():
            return "unauthorized", str(exc)
        case TimeoutError():
            return "timeout", "no answer within the time limit"
        case msgspec.DecodeError():
            return "decode", f"the reply is not what the API promises: {exc}"
        case aiohttp.ClientError() | OSError():
            cause = getattr(exc, "os_error", None) or exc
            return (
                "connect",
                f"connection to the API server failed ({type(exc).__name__} {getattr(cause, 'errno', '') or ''})",
            )
        case _:
            return "bug", f"unexpected {type(exc).__name__}"


class KubernetesDiscovery:
    """Finds pods by `selector` or, with `service`, as the endpoints of that Service; one of the two is given.

    Raises ValueError from the constructor when the selector cannot be read.
    """

    def __init__(
        self,
        on_pods: OnPods,
        *,
        namespace: str | None = None,
        selector: str | None = None,
        service: str | None = None,
        ports: Ports = Ports(),  # noqa: B008 - frozen
        credentials: Credentials | None = None,
        observer: Observer | None = None,
        pace: Pace = Pace(),  # noqa: B008 - frozen
        chance: random.Random | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        if (selector is None) == (service is None):
            raise ValueError("--discovery kubernetes needs either --selector LABELS or --service NAME")
        self._on_pods, self._ports, self._clock = on_pods, ports, clock
        self._credentials, self._namespace = credentials or Credentials(), namespace
        self._observer, self._pace, self._chance = observer or Unobserved(), pace, chance or random.Random()
        self._told: tuple[PodSpec, ...] | None = None
        self._found = Found()
        self._slices: Reflector[EndpointSlice] | None = None
        if service is None:
            assert selector is not None
            query = Query("/api/v1/namespaces/{}/pods", parse_selector(selector), selector)
            self._pods = self._reflector("pods", KubePod, _fixed(query))
        else:
            labels = f"kubernetes.io/service-name={service}"
            query = Query("/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices", parse_selector(labels), labels)
            self._slices = self._reflector("endpointslices", EndpointSlice, _fixed(query))
            self._pods = self._reflector("pods of the service", KubePod, _of_service(service))

    def _reflector(
        self, kind: str, of: type[Object], query: Callable[[KubeApi], Awaitable[Query]]
    ) -> Reflector[Object]:
        return Reflector(
            kind=kind,
            of=of,
            api=KubeApi(self._credentials, self._namespace),
            query=query,
            on_change=self._tell,
            observer=self._observer,
            pace=self._pace,
            chance=self._chance,
            clock=self._clock,
        )

    async def run(self) -> None:
        """Never returns; ends only by cancellation."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pods.run(), name="discovery-pods")
            if self._slices is not None:
                group.create_task(self._slices.run(), name="discovery-endpointslices")

    def status(self) -> DiscoveryStatus:
        """How it is doing; in Service mode the slices decide, the pods only add to them."""
        main = self._slices or self._pods
        age_s = None if main.synced_at_s is None else self._clock() - main.synced_at_s
        return DiscoveryStatus(
            kind=f"kubernetes {main.kind}",
            synced=main.synced_at_s is not None,
            last_sync_age_s=age_s,
            restarts=main.restarts,
            last_error=main.last_error or self._pods.last_error,
            problems=self._found.problems,
        )

    def _tell(self) -> None:
        """Works the fleet out anew and tells it if it is another. An empty fleet is told only when a list was empty."""
        if self._slices is None:
            if self._pods.synced_at_s is None:
                return
            self._found = pods_by_selector(self._pods.objects.values(), self._ports)
        else:
            if self._slices.synced_at_s is None or not self._pods.tried:
                return
            by_uid = {pod.metadata.uid: pod for pod in self._pods.objects.values()}
            self._found = pods_by_service(self._slices.objects.values(), by_uid, self._ports)
        if self._found.pods != self._told:
            self._on_pods(self._found.pods)
            self._told = self._found.pods


def _fixed(query: Query) -> Callable[[KubeApi], Awaitable[Query]]:
    async def in_namespace(api: KubeApi) -> Query:
        return msgspec.structs.replace(query, path=query.path.format(quote(api.namespace, safe="")))

    return in_namespace


def _of_service(name: str) -> Callable[[KubeApi], Awaitable[Query]]:
    """The pods that a Service selects, asked anew in each loop."""

    async def ask(api: KubeApi) -> Query:
        namespace = quote(api.namespace, safe="")
        body = await api.get(f"/api/v1/namespaces/{namespace}/services/{quote(name, safe='')}")
        labels = msgspec.json.decode(body, type=Service).spec.selector
        if not labels:
            raise ApiError(404, f"Service {name} has no selector, so restarts and annotations of its pods are not seen")
        text = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        return Query(f"/api/v1/namespaces/{namespace}/pods", parse_selector(text), text)

    return ask
