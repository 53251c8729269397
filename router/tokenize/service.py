"""The tokens of every model this router serves: loading, retrying, and a bounded way off the event loop.

Short requests are rendered and encoded where they stand; long ones go to a small thread pool with a bounded queue and
a deadline. The network is touched only by loading, which a child process does (export.py), never by a request.
May import: the standard library, router.core, router.ops, and this room.
"""

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import msgspec

from router.core.types import Clock
from router.ops import Metrics
from router.tokenize.canary import Parity, first_difference
from router.tokenize.chat import Unrenderable
from router.tokenize.export import Exported
from router.tokenize.load import LoadFailure, is_at_hand, load
from router.tokenize.model import ModelOptions, ModelRenderer, Rendered, TextJob, completion
from router.tokenize.pod import AskPod, PodBudget
from router.tokenize.port import NoTokens, PromptTokens
from router.tokenize.template import TemplateRefusal

log = logging.getLogger("warmroute.tokenize")

ENDPOINTS: dict[str, Callable[[ModelRenderer, bytes], Rendered]] = {
    "/v1/chat/completions": ModelRenderer.chat,
    "/v1/completions": completion,
    "/v1/responses": ModelRenderer.responses,
    "/v1/messages": ModelRenderer.messages,
}
Loader = Callable[..., Exported]


class TokenLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one process's tokenizing, with their reasons."""

    threads: int = 2  # encoding releases the interpreter lock; more threads only help on more cores
    queue_requests: int = 64  # waiting beyond this costs more than a cold pod
    deadline_s: float = 1.0  # 30k cold tokens take about 0.1 s; later than this, load decides
    inline_max_bytes: int = 131_072  # parsing and rendering such a body takes well under a millisecond
    inline_max_chars: int = 4_096  # so does encoding that much: a thread would hardly have woken
    body_max_bytes: int = 8 * 1024 * 1024  # about two million tokens
    cache_max_bytes: int = 128 * 1024 * 1024  # pieces and their ids, per tokenizer; a 7k-token chat takes about 75 KB
    load_deadline_s: float = 300.0  # a download of tokenizer files included
    retry_first_s: float = 5.0
    retry_max_s: float = 600.0
    pod_questions_max: int = 4  # at a time, to /tokenize: each costs the pod's API server what it saves us
    compare_one_in: int = 200  # exact prompts whose ids are compared with a pod's; 0: none
    pod_when_suspect: bool = False  # a model whose ids keep differing: ask its pods instead


class _Model(msgspec.Struct):
    """What we know of one model's tokenizer. Owned by the event loop."""

    source: str
    configured: bool  # named by a setting: the hub may be asked
    options: ModelOptions
    state: Literal["loading", "ready", "absent", "failed"] = "loading"
    renderer: ModelRenderer | None = None
    error: str = ""
    attempts: int = 0
    task: asyncio.Task[None] | None = None
    parity: Parity = msgspec.field(default_factory=lambda: Parity(one_in=0))

    def learn_length(self, max_model_len_tokens: int | None) -> None:
        """The pods' limit, which truncate_prompt_tokens -1 means."""
        if max_model_len_tokens not in (None, self.options.max_model_len_tokens):
            self.options = msgspec.structs.replace(self.options, max_model_len_tokens=max_model_len_tokens)
            if self.renderer is not None:
                self.renderer.options = self.options


class TokenService:
    """Implements router.tokenize.port.Tokens. Create it anywhere, `start()` it in the event loop that asks it.

    `tokenizers` maps a model's base id or a served name to a folder or hub id. `options` says, by the same names (or
    "*" for all), what the pods were started with.
    """

    def __init__(
        self,
        tokenizers: Mapping[str, str] | None = None,
        *,
        options: Mapping[str, ModelOptions] | None = None,
        limits: TokenLimits | None = None,
        ask_pod: AskPod | None = None,
        metrics: Metrics | None = None,
        clock: Clock = time.monotonic,
        loader: Loader = load,
        at_hand: Callable[[str], bool] = is_at_hand,
    ) -> None:
        self._configured = dict(tokenizers or {})
        self._options = dict(options or {})
        self.limits = limits or TokenLimits()
        self._load = loader
        self._at_hand = at_hand
        self._models: dict[str, _Model] = {}  # by configured name or source
        self._names: dict[str, str] = {}  # base id or served name -> key of _models
        self._pool = ThreadPoolExecutor(self.limits.threads, thread_name_prefix="tokens")
        self._loaders = ThreadPoolExecutor(2, thread_name_prefix="tokenizer-load")
        self._in_pool = 0
        self._started = False
        self._stop = threading.Event()
        self._comparing: set[asyncio.Task[None]] = set()
        self._metrics = metrics
        self._budget: PodBudget | None = None
        if ask_pod is not None:
            self._budget = PodBudget(
                ask_pod,
                clock=clock,
                in_flight_max=self.limits.pod_questions_max,
                deadline_s=self.limits.deadline_s,
            )
        self.outcomes: Counter[str] = Counter()  # "exact", "partial" or a FallbackReason

    # --- life ---

    async def start(self) -> None:
        """Begin to load what the settings name. Returns at once; status() tells how far it is."""
        self._started = True
        for name, source in self._configured.items():
            self._names[name] = name
            self._add(name, source, configured=True, names=(name,))

    async def close(self) -> None:
        """Stop loading and encoding; a child process that is still loading is killed."""
        self._stop.set()
        tasks = [m.task for m in self._models.values() if m.task is not None]
        tasks += self._comparing
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._loaders.shutdown(wait=False, cancel_futures=True)

    def ensure(
        self,
        model: str,
        source: str | None = None,
        *,
        names: Iterable[str] = (),
        max_model_len_tokens: int | None = None,
    ) -> None:
        """A pod serves `model` (its base id), known to clients as `names`; `source` is its root path or hub id.

        Cheap and idempotent: call it whenever a model is learnt. Without a setting for the model or a name of it, only
        a local folder or the hub's cache is used.
        """
        if not self._started:
            return
        if model not in self._names:
            chosen = next((name for name in (model, *names) if name in self._configured), None)
            if chosen is not None:
                self._names[model] = chosen
            else:
                self._names[model] = source or model
                self._add(source or model, source or model, configured=False, names=(model, *names))
        self._models[self._names[model]].learn_length(max_model_len_tokens)

    def _add(self, key: str, source: str, *, configured: bool, names: Iterable[str]) -> None:
        if key in self._models:
            return
        named = (self._options[name] for name in (*names, key, "*") if name in self._options)
        options = next(named, ModelOptions())
        parity = Parity(one_in=self.limits.compare_one_in)
        entry = self._models[key] = _Model(source=source, configured=configured, options=options, parity=parity)
        entry.task = asyncio.get_running_loop().create_task(self._keep_loading(entry), name=f"tokenizer {key}")

    async def _keep_loading(self, entry: _Model) -> None:
        loop = asyncio.get_running_loop()
        while True:
            entry.attempts += 1
            try:
                if not entry.configured and not await loop.run_in_executor(self._loaders, self._at_hand, entry.source):
                    entry.state = "absent"
                else:
                    renderer = await loop.run_in_executor(self._loaders, self._build, entry)
                    renderer.options = entry.options  # they may have been learnt meanwhile
                    entry.renderer = renderer
                    entry.state, entry.error = "ready", ""
                    return
            except (LoadFailure, Unrenderable, ValueError) as exc:
                entry.state, entry.error = "failed", str(exc)
                log.warning("tokenizer %s: %s", entry.source, entry.error)
            await asyncio.sleep(min(self.limits.retry_first_s * 2.0 ** (entry.attempts - 1), self.limits.retry_max_s))

    def _build(self, entry: _Model) -> ModelRenderer:
        exported = self._load(
            entry.source, offline=not entry.configured, deadline_s=self.limits.load_deadline_s, stop=self._stop
        )
        return ModelRenderer(exported, entry.options, cache_max_bytes=self.limits.cache_max_bytes)

    def status(self) -> dict[str, Any]:
        """For /ready details and /debug: each model's tokenizer, JSON-able."""
        models = {
            key: {
                "source": m.source,
                "state": m.state,
                "attempts": m.attempts,
                **({"error": m.error} if m.error else {}),
                **(m.renderer.details() if m.renderer else {}),
                **({"parity": m.parity.details()} if m.parity.compared_requests else {}),
                "models": sorted(name for name, k in self._names.items() if k == key),
            }
            for key, m in self._models.items()
        }
        return {"models": models, "outcomes": dict(self.outcomes)}

    # --- requests ---

    async def prompt(self, *, model: str, endpoint: str, body: bytes) -> PromptTokens | NoTokens:
        """See router.tokenize.port.Tokens."""
        result = await self._prompt(model, endpoint, body)
        if isinstance(result, NoTokens):
            self.outcomes[result.reason] += 1
        else:
            self.outcomes["partial" if result.partial else "exact"] += 1
        return result

    async def _prompt(self, model: str, endpoint: str, body: bytes) -> PromptTokens | NoTokens:
        if endpoint not in ENDPOINTS:
            return NoTokens("endpoint", endpoint)
        if len(body) > self.limits.body_max_bytes:
            return NoTokens("too_long", f"{len(body)} bytes")
        entry = self._models.get(self._names.get(model, ""))
        if entry is not None and entry.parity.is_suspect and self.limits.pod_when_suspect:
            asked = await self._from_pod(model, endpoint, body)
            return asked or NoTokens("tokenizer_failed", "its ids differ from the pods'")
        result = await self._local(entry, endpoint, body)
        if isinstance(result, NoTokens):
            asked = await self._from_pod(model, endpoint, body) if _pod_may_know(entry, result) else None
            return asked or result
        if entry is not None and not result.partial and self._budget is not None and entry.parity.take():
            self._compare_later(entry, model, endpoint, body, result.packed)
        return result

    async def _local(self, entry: _Model | None, endpoint: str, body: bytes) -> PromptTokens | NoTokens:
        found = _renderer(entry)
        if endpoint != "/v1/completions" and isinstance(found, NoTokens):
            return found
        if len(body) > self.limits.inline_max_bytes:
            return await self._off_loop(functools.partial(render_fully, found, endpoint, body))
        rendered = render(found, endpoint, body)
        if not isinstance(rendered, TextJob):
            return rendered
        if isinstance(found, ModelRenderer):
            self._look_after(found, rendered)
        if rendered.missing_chars <= self.limits.inline_max_chars:
            return rendered.finish()
        return await self._off_loop(rendered.finish)

    def _look_after(self, renderer: ModelRenderer, job: TextJob) -> None:
        """Count what the cache saved, and now and then check a live request the slow way, in the pool."""
        if self._metrics is not None:
            self._metrics.token_chars.labels(source="cache").inc(job.known_chars)
            self._metrics.token_chars.labels(source="tokenizer").inc(job.missing_chars)
        if not self._in_pool and (check := renderer.due_check()) is not None:
            self._pool.submit(self._checked, check)

    def _checked(self, check: Callable[[], bool]) -> None:
        same = check()
        if self._metrics is not None:
            self._metrics.token_checks.labels(result="same" if same else "different").inc()

    # --- the pods' own tokenizer ---

    async def _from_pod(self, model: str, endpoint: str, body: bytes) -> PromptTokens | None:
        if self._budget is None:
            return None
        try:
            packed = await self._budget.tokens(model, endpoint, body)
        except Unrenderable:
            return None
        if packed is None:
            return None
        self.outcomes["asked_pod"] += 1
        return PromptTokens(packed=packed)

    def _compare_later(self, entry: _Model, model: str, endpoint: str, body: bytes, packed: bytes) -> None:
        if len(self._comparing) < self.limits.pod_questions_max:
            task = asyncio.get_running_loop().create_task(self._compare(entry, model, endpoint, body, packed))
            self._comparing.add(task)
            task.add_done_callback(self._comparing.discard)

    async def _compare(self, entry: _Model, model: str, endpoint: str, body: bytes, packed: bytes) -> None:
        try:
            theirs = await self._budget.tokens(model, endpoint, body) if self._budget is not None else None
        except Unrenderable:
            return
        if theirs is None:
            return
        difference = first_difference(packed, theirs)
        if self._metrics is not None:
            self._metrics.token_parity.labels(result="same" if difference is None else "different").inc()
        if difference is not None:
            log.warning("a prompt's ids differ from the pod's", extra={"fields": msgspec.to_builtins(difference)})
        if entry.parity.record(difference):
            log.error(
                "the tokenizer or chat template of %s is not the one its pods use: prefixes will not be found",
                entry.source,
            )

    async def _off_loop(self, work: Callable[[], PromptTokens | NoTokens]) -> PromptTokens | NoTokens:
        if self._in_pool >= self.limits.queue_requests:
            return NoTokens("busy", f"{self._in_pool} requests are being tokenized")
        self._in_pool += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(self._left_pool)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(future), self.limits.deadline_s)
        return NoTokens("deadline", f"{self.limits.deadline_s:g} s")

    def _left_pool(self, future: "asyncio.Future[PromptTokens | NoTokens]") -> None:
        self._in_pool -= 1
        if not future.cancelled():
            future.exception()  # looked at: a late failure has no reader left


def _renderer(entry: _Model | None) -> ModelRenderer | NoTokens:
    if entry is None:
        return NoTokens("no_tokenizer", "none is set for this model")
    if entry.renderer is not None:
        return entry.renderer
    if entry.state == "failed":
        return NoTokens("tokenizer_failed", entry.error)
    return NoTokens("no_tokenizer", entry.state)


def _pod_may_know(entry: _Model | None, result: NoTokens) -> bool:
    """Is it the model that we cannot render, and not this body? For harmony /tokenize gives other ids than chats.

    Without a tokenizer the pods are not asked: that would be every request, and approximate routing serves those.
    """
    coded = entry.renderer.unrenderable if entry is not None and entry.renderer is not None else None
    return result.reason == "unrenderable" and coded is not None and coded != "harmony"


def render(renderer: ModelRenderer | NoTokens, endpoint: str, body: bytes) -> Rendered:
    """One request up to the point where its missing pieces must be encoded. Prompts given as ids need no tokenizer."""
    try:
        if endpoint == "/v1/completions":
            return completion(renderer, body)
        return renderer if isinstance(renderer, NoTokens) else ENDPOINTS[endpoint](renderer, body)
    except Unrenderable as exc:
        return NoTokens("unrenderable", str(exc))
    except TemplateRefusal as exc:
        return NoTokens("template_error", str(exc))


def render_fully(renderer: ModelRenderer | NoTokens, endpoint: str, body: bytes) -> PromptTokens | NoTokens:
    """The ids of one request, in whatever thread this runs."""
    rendered = render(renderer, endpoint, body)
    return rendered.finish() if isinstance(rendered, TextJob) else rendered
