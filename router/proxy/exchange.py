"""One request's exchange with the fleet: choose, send, maybe try another, pass the reply on as it comes.

A request is repeated only before the first byte of a reply (router.policy.retry says when). After it, a break is shown
to the client as a break: an error event in the endpoint's form, and a transfer without its end (H03).
May import: aiohttp.web, router.route, router.policy, router.fleet.fleet (types), router.proxy.*, router.ops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence, Set
from typing import Any, Protocol

import msgspec
from aiohttp import web

from router.core.types import WorkerAddress
from router.fleet.state import Pod
from router.ops import Metrics
from router.policy.pick import Refused
from router.policy.retry import Again, Attempts, FailureKind, RetryBudget, may_retry
from router.proxy.body import HeldBody
from router.proxy.errors import HttpError, stream_error_event
from router.proxy.front import RelayResponse
from router.proxy.headers import (
    RawHeaders,
    header_safe,
    is_event_stream,
    takes_events,
    to_client,
    to_pod,
    value_of,
)
from router.proxy.limits import ProxyLimits
from router.proxy.record import Record
from router.proxy.sticky import ResponseHomes, find_response_id
from router.proxy.upstream import Reply, Upstream, UpstreamFailed, UpstreamRequest
from router.proxy.watch import GoneWatch, Watch
from router.proxy.watch import Waiting as WaitingFor
from router.route import Choice, Prepared, RouteRequest
from router.waiting import Asking, Chooses, Stopping, Waiting

log = logging.getLogger("router.proxy")

KEPT_BODY_BYTES = 65536  # of an answer that may be given up for another pod's
KEPT_BODY_LIMIT_S = 5.0
SHUTDOWN_WORDS = b"cannot schedule new futures after shutdown"
WALK_MAX_WORKERS = 64  # asked in turn for a stored response whose home is not known
SNIFF_BYTES = 8192  # of a reply's beginning, where a stored response's id stands
EVENT_END_BYTES = 4  # the longest empty line after a line: CR LF CR LF
CLIENT_GONE = 499


class ConductorPort(Chooses, Protocol):
    """What is needed of router.route.Conductor."""

    async def prepare(self, request: RouteRequest) -> Prepared: ...
    def choose(self, prepared: Prepared, *, exclude: Set[WorkerAddress] = frozenset()) -> Choice | Refused: ...
    def has_policy(self, name: str) -> bool: ...


class FleetPort(Protocol):
    """What is needed of router.fleet.Fleet."""

    def failed(self, worker: WorkerAddress, kind: FailureKind) -> None: ...
    def succeeded(self, worker: WorkerAddress) -> None: ...
    def sent(self, worker: WorkerAddress) -> None: ...
    def doubted(self, worker: WorkerAddress) -> None: ...
    def gone(self, pod: str) -> asyncio.Event: ...
    def pods(self) -> Sequence[Pod]: ...
    def serves(self, model: str | None) -> bool: ...
    async def serves_by_now(self, model: str | None) -> bool: ...
    def heard_models(self) -> bool: ...
    def model_list(self) -> list[dict[str, Any]]: ...


class Parts(msgspec.Struct, kw_only=True):
    """What all exchanges of a process share."""

    conductor: ConductorPort
    fleet: FleetPort
    upstream: Upstream
    limits: ProxyLimits
    metrics: Metrics
    budget: RetryBudget
    gone: GoneWatch
    homes: ResponseHomes
    waiting: Waiting | None = None  # None: pods queue


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One client's request as it was received, its body apart."""

    endpoint: str
    target: str  # path and query as received
    headers: RawHeaders
    request_id: bytes
    authorization: bool  # the client's own may go on
    pod_key: bytes | None = None  # sent as Authorization instead
    only: frozenset[WorkerAddress] | None = None  # the workers that may get it (a stored response's home)
    walk: bool = False  # nobody knows which pod holds it: a 404 means "ask the next"
    asking: Asking | None = None  # its place in line while pods have enough to do; None: it does not wait


class Failure(msgspec.Struct, frozen=True):
    """An attempt that ended before anything went to the client. `kept`: the pod's own answer, if it gave one."""

    kind: FailureKind | None  # None: the pod does not hold what was asked for (walk)
    kept: Kept | None = None


class Kept(msgspec.Struct, frozen=True):
    """A pod's whole answer, held back because another pod may give a better one."""

    status: int
    reason: str
    headers: RawHeaders
    body: bytes
    choice: Choice


class Exchange:
    """The life of one request after it was read and understood."""

    def __init__(
        self,
        parts: Parts,
        request: web.BaseRequest,
        asked: Asked,
        prepared: Prepared,
        held: HeldBody,
        record: Record,
    ) -> None:
        self._parts = parts
        self._request = request
        self._asked = asked
        self._prepared: Prepared | None = prepared
        record.prompt_tokens = prepared.prompt_tokens
        self._held = held
        self._record = record
        self._response: RelayResponse | None = None
        self._event_stream = False
        self._takes_events = False  # of ours, between the pod's
        self._tail = b""  # the last bytes of the pod's events
        self._sniffed = b""
        self._attempts = Attempts()
        self._tried: set[WorkerAddress] = set()

    async def run(self) -> web.StreamResponse:
        """The reply, sent. Raises HttpError when there is none to pass on, ConnectionError when the client has left."""
        parts = self._parts
        parts.budget.request()
        last: Failure | None = None
        kept: Kept | None = None
        while True:
            assert self._prepared is not None  # until a reply has begun
            if parts.waiting is None or self._asked.asking is None or last is not None:
                choice = parts.conductor.choose(self._prepared, exclude=self._excluded())
            else:  # whoever was sent once does not wait again
                choice = await self._wait(parts.waiting, self._asked.asking)
            if isinstance(choice, Refused):
                return await self._refused(choice, last, kept)
            with choice.booking:
                outcome = await self._attempt(choice)
                if isinstance(outcome, Failure) and outcome.kind != "timeout":  # a slow prefill may have filled a cache
                    choice.booking.void()
            if not isinstance(outcome, Failure):
                return outcome
            last, kept = outcome, outcome.kept or kept
            self._tried.add(choice.worker)
            if not self._may_go_on(outcome):
                return await self._give_up(last, kept)

    async def _wait(self, waiting: Waiting, asking: Asking) -> Choice | Refused:
        """The worker as soon as one has room, or 429."""
        assert self._prepared is not None
        try:
            choice, self._record.waited_s = await waiting.choose(self._prepared, asking)
        except Stopping:
            raise self._router_stops() from None
        return choice

    def _excluded(self) -> Set[WorkerAddress]:
        only = self._asked.only
        if only is None:
            return self._tried
        return {w for pod in self._parts.fleet.pods() for w in pod.workers if w not in only} | self._tried

    def _may_go_on(self, failure: Failure) -> bool:
        if failure.kind is None:
            return len(self._tried) < WALK_MAX_WORKERS
        verdict = may_retry(failure.kind, self._attempts, self._parts.budget, self._parts.limits.retry_rules)
        if isinstance(verdict, Again):
            self._parts.metrics.retries.labels(failure.kind).inc()
            return True
        self._parts.metrics.retries_denied.labels(verdict.reason).inc()
        return False

    # -- one worker -------------------------------------------------------------------------------------------------

    async def _attempt(self, choice: Choice) -> web.StreamResponse | Failure:
        """Try a worker; once more on a fresh connection when a reused one was reset before any byte of a reply."""
        outcome = await self._attempt_once(choice, fresh=False)
        if isinstance(outcome, Failure) and outcome.kind == "ambiguous" and self._may_go_on(outcome):
            self._parts.metrics.ambiguous_retries.inc()
            outcome = await self._attempt_once(choice, fresh=True)
        return outcome

    async def _attempt_once(self, choice: Choice, *, fresh: bool) -> web.StreamResponse | Failure:
        parts, record = self._parts, self._record
        record.choice = choice
        record.attempts += 1
        parts.fleet.sent(choice.worker)
        timeout = asyncio.timeout(None)
        watch: Watch | None = None
        try:
            async with timeout:
                watch = Watch(timeout)
                event = parts.gone.add(choice.worker.pod, watch)
                try:
                    watch.wait_for("first_byte", parts.limits.first_byte_limit_s)
                    return await self._converse(choice, watch, fresh=fresh)
                finally:
                    parts.gone.remove(event, watch)
                    watch.stop()
        except UpstreamFailed as exc:
            return await self._failed(choice, exc.kind)
        except TimeoutError:
            if watch is None or watch.expired is None:
                raise
            return await self._timed_out(choice, watch.expired)

    async def _converse(self, choice: Choice, watch: Watch, *, fresh: bool) -> web.StreamResponse | Failure:
        """Send, judge the head, pass the reply on."""
        parts = self._parts
        reply = await parts.upstream.send(self._for_pod(choice), fresh=fresh)
        try:
            verdict, begun = await self._judge(reply, choice)
            if verdict is not None:
                self._note_failure(choice, verdict.kind)
                return verdict
            if reply.status >= 500 and reply.status != 503:
                self._note_failure(choice, "status_5xx")
            else:
                parts.fleet.succeeded(choice.worker)
            if reply.status == 404 and self._record.model is not None:
                parts.fleet.doubted(choice.worker)
            return await self._relay(reply, begun, choice, watch)
        finally:
            reply.close()

    def _for_pod(self, choice: Choice) -> UpstreamRequest:
        asked, request = self._asked, self._request
        remote = request.remote
        return UpstreamRequest(
            method=request.method,
            url=choice.url,
            target=asked.target,
            headers=to_pod(
                asked.headers,
                request_id=asked.request_id,
                client=remote.encode() if remote else None,
                scheme=request.scheme.encode(),
                authorization=asked.authorization,
                rank=choice.data_parallel_rank,
                pod_key=asked.pod_key,
            ),
            body=self._held.body,
        )

    async def _judge(self, reply: Reply, choice: Choice) -> tuple[Failure | None, bytes]:
        """Is this an answer to pass on, or one that another pod may better? Also what was read of the body so far."""
        status = reply.status
        walks = self._asked.walk and status == 404
        if status not in (429, 500, 503) and not walks:
            return None, b""
        body, whole = await _read_some(reply)
        if status == 500 and SHUTDOWN_WORDS not in body:
            return None, body
        if not whole:
            return None, body
        kind: FailureKind | None = "backpressure"
        if status == 500:
            kind = "shutting_down"
        elif walks:
            kind = None
        return Failure(kind, Kept(status, reply.reason, reply.headers, body, choice)), b""

    # -- passing on ---------------------------------------------------------------------------------------------------

    async def _relay(self, reply: Reply, begun: bytes, choice: Choice, watch: Watch) -> web.StreamResponse:
        """Head, then bytes as they come; a client that reads slowly holds the pod back. Raises UpstreamFailed.

        What has come already goes out in one write: head and beginning together, the last bytes and the end together.
        """
        record, limits = self._record, self._parts.limits
        chunk = begun or reply.read_nowait()
        response = await self._begin(reply.status, reply.reason, reply.headers, choice)
        if chunk is None:
            response.send_head()
            chunk = await self._first_chunk(reply, response)
        if reply.status >= 400:
            choice.booking.void()
        elif chunk:
            choice.booking.first_token(streamed=self._event_stream)
        if chunk:
            record.first_byte()
        sniffs = self._asked.endpoint == "/v1/responses" and reply.status == 200
        while chunk:
            record.bytes_out += len(chunk)
            if self._takes_events:
                self._tail = (self._tail + chunk[-EVENT_END_BYTES:])[-EVENT_END_BYTES:]
            if sniffs:
                sniffs = self._sniff(chunk, choice)
            more = reply.read_nowait()
            if more == b"":
                break
            watch.wait_for("client", limits.client_stall_limit_s)
            await response.write(chunk)
            watch.wait_for("idle", limits.idle_limit_s)
            chunk = more or await reply.read()
        if reply.delimited_by_close and self._takes_events and not self._at_event_border:
            if chunk:
                await response.write(chunk)
            raise UpstreamFailed("reset", "an event stream without length ended inside an event")
        watch.wait_for("client", limits.client_stall_limit_s)
        await response.write_eof(chunk)
        return response

    async def _first_chunk(self, reply: Reply, response: RelayResponse) -> bytes:
        """The body's beginning. Comments keep load balancers from cutting a stream silent in its prefill (H05)."""
        interval_s = self._parts.limits.stream_comment_interval_s
        while interval_s and self._takes_events:
            try:
                async with asyncio.timeout(interval_s):
                    return await reply.read()
            except TimeoutError:
                await response.write(b":\n\n")
        return await reply.read()

    async def _begin(self, status: int, reason: str, headers: RawHeaders, choice: Choice) -> RelayResponse:
        """Send the head to the client: only now is the pod's status known (H04)."""
        self._event_stream = is_event_stream(headers)
        self._takes_events = takes_events(headers)
        out = to_client(
            headers,
            request_id=self._asked.request_id,
            ours=decision_headers(choice) if self._parts.limits.decision_headers else (),
            event_stream=self._event_stream,
            pod_url=choice.url,
        )
        if status in (429, 503) and value_of(headers, b"retry-after") is None:
            out.append((b"Retry-After", str(self._parts.limits.retry_after_s).encode()))
        self._prepared = None
        self._held.release()  # nothing can be sent again from here on: a long stream does not keep its prompt
        self._record.status = status
        self._response = response = RelayResponse(status, reason, out)
        await response.prepare(self._request)
        return response

    @property
    def _at_event_border(self) -> bool:
        """What has come of the pod's events ends with an empty line, wherever its pieces were cut."""
        return not self._tail or self._tail.endswith((b"\n\n", b"\n\r\n", b"\r\r"))

    def _sniff(self, chunk: bytes, choice: Choice) -> bool:
        """Remember which pod holds a stored response; True while its id has not come yet."""
        self._sniffed += chunk[: SNIFF_BYTES - len(self._sniffed)]
        found = find_response_id(self._sniffed)
        if found is not None:
            self._parts.homes.remember(found, choice.worker.pod)
        return found is None and len(self._sniffed) < SNIFF_BYTES

    # -- endings ------------------------------------------------------------------------------------------------------

    def _note_failure(self, choice: Choice, kind: FailureKind | None) -> None:
        if kind is None:
            return
        self._attempts.failed(kind)
        if kind != "ambiguous":  # an idle connection that was closed says nothing about the worker
            self._parts.fleet.failed(choice.worker, kind)
        self._parts.metrics.pod_failures.labels(kind).inc()

    async def _failed(self, choice: Choice, kind: FailureKind) -> web.StreamResponse | Failure:
        self._note_failure(choice, kind)
        if self._response is not None:
            return await self._break_off("the pod broke off", kind)
        return Failure(kind)

    async def _timed_out(self, choice: Choice, on: WaitingFor) -> web.StreamResponse | Failure:
        if on == "shutdown":
            stops = self._router_stops()
            if self._response is not None:
                return await self._break_off("the router is shutting down", "timeout")
            raise stops
        if on == "client":
            self._record.note = "client_stalled"
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("client does not read")
        return await self._failed(choice, "reset" if on == "gone" else "timeout")

    def _router_stops(self) -> HttpError:
        self._record.note = "router_stops"
        return HttpError(503, "The router is shutting down; try again.", retry_after_s=1, close=True)

    async def _break_off(self, why: str, reason: FailureKind) -> web.StreamResponse:
        """The head went out already: end visibly."""
        response = self._response
        assert response is not None
        self._parts.metrics.broken_streams.labels(reason).inc()
        self._record.note = f"broken:{reason}"
        if self._takes_events and self._at_event_border:
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await response.write(stream_error_event(self._asked.endpoint, f"The reply is incomplete: {why}."))
        response.break_off()
        return response

    async def _refused(self, refused: Refused, last: Failure | None, kept: Kept | None) -> web.StreamResponse:
        """No worker is left, or none ever was."""
        if last is not None:
            return await self._give_up(last, kept)
        limits = self._parts.limits
        self._record.note = refused.reason
        if refused.reason == "overloaded":
            raise HttpError(
                429,
                "Every pod is at its limit; try again.",
                code="overloaded",
                retry_after_s=refused.retry_after_s or limits.retry_after_s,
            )
        if refused.reason == "too_long":
            raise HttpError(400, self._too_long(), code="context_length_exceeded")
        raise HttpError(503, "No pod that serves this model is ready; try again.", retry_after_s=limits.retry_after_s)

    def _too_long(self) -> str:
        """By how much, as vLLM says it: whoever must send less has to know."""
        model, prompt_tokens = self._record.model, self._record.prompt_tokens
        entries = [pod.entry(model) for pod in self._parts.fleet.pods() if pod.serving and model is not None]
        longest = max((e.max_model_len_tokens or 0 for e in entries if e is not None), default=0)
        says = "The prompt is longer than the maximum context length of every pod that serves this model"
        return f"{says}: {prompt_tokens} tokens, and the largest is {longest}." if longest else f"{says}."

    async def _give_up(self, last: Failure, kept: Kept | None) -> web.StreamResponse:
        """The last answer of a pod if there was one, else what went wrong."""
        if kept is not None and kept.status != 500:  # vLLM's shutting-down 500 becomes a 503 that says "try again"
            return await self._answer_kept(kept)
        retry_after_s = self._parts.limits.retry_after_s
        self._record.note = last.kind or ""
        if last.kind in ("connect", "shutting_down", "backpressure"):
            raise HttpError(503, "No pod could take this request; try again.", retry_after_s=retry_after_s)
        if last.kind == "timeout":
            raise HttpError(504, "The pod sent nothing within the first-byte limit.")
        raise HttpError(502, "The pod broke off before it replied; whether it ran the request is not known.")

    async def _answer_kept(self, kept: Kept) -> web.StreamResponse:
        response = await self._begin(kept.status, kept.reason, kept.headers, kept.choice)
        self._record.bytes_out += len(kept.body)
        await response.write_eof(kept.body)
        return response


async def _read_some(reply: Reply) -> tuple[bytes, bool]:
    """A short answer's body, and whether that was all of it."""
    body = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KEPT_BODY_LIMIT_S):
            while len(body) <= KEPT_BODY_BYTES:
                chunk = await reply.read()
                if not chunk:
                    return body, True
                body += chunk
    return body, False


def decision_headers(choice: Choice) -> list[tuple[bytes, bytes]]:
    """What the choice was, for clients that want to know (DESIGN 14)."""
    out = [
        (b"x-warmroute-pod", header_safe(choice.name)),
        (b"x-warmroute-policy", header_safe(choice.policy)),
        (b"x-warmroute-reason", header_safe(choice.reason)),
    ]
    for name, value in (
        (b"x-warmroute-prompt-tokens", choice.prompt_tokens),
        (b"x-warmroute-matched-tokens", choice.matched_tokens),
        (b"x-warmroute-indexed-tokens", choice.indexed_tokens),
    ):
        if value is not None:
            out.append((name, str(value).encode()))
    return out
