"""The tokens of every model this router serves, and a bounded way off the event loop to get them.

Short requests are rendered and encoded where they stand; long ones go to a small thread pool with a bounded queue and
a deadline. Nothing here loads a tokenizer or asks the hub (shelf.py does); a pod is asked only within a budget.
May import: the standard library, router.core, router.ops, and this room.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from router.core.types import Clock
from router.ops import Metrics
from router.tokenize.canary import Difference, first_difference
from router.tokenize.chat import Unrenderable
from router.tokenize.load import is_at_hand, load, may_be_fetched
from router.tokenize.model import ModelOptions, ModelRenderer, TextJob
from router.tokenize.pod import AskPod, PodBudget
from router.tokenize.port import NoTokens, PromptTokens
from router.tokenize.rendering import ENDPOINTS, finish, render, render_fully, renderer
from router.tokenize.shelf import Loader, LoadLimits, Shelf, Tokenizer

log = logging.getLogger("warmroute.tokenize")


class TokenLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one process's tokenizing, with their reasons."""

    threads: int = 2  # encoding releases the interpreter lock; more threads only help on more cores
    queue_requests: int = 64  # waiting beyond this costs more than a cold pod
    deadline_s: float = 1.0  # 30k cold tokens take about 0.1 s; later than this, load decides
    inline_max_bytes: int = 131_072  # parsing and rendering such a body takes about a millisecond
    inline_max_chars: int = 4_096  # so does encoding that much: a thread would hardly have woken
    inline_max_messages: int = 256  # templates may loop over messages within a loop over messages
    body_max_bytes: int = 8 * 1024 * 1024  # about two million tokens
    messages_max: int = 10_000  # beyond: minutes of such loops
    cache_max_bytes: int = 128 * 1024 * 1024  # pieces and their ids, per tokenizer; a 7k-token chat takes about 75 KB
    pod_questions_max: int = 4  # at a time, to /tokenize: each costs the pod's API server what it saves us
    compare_one_in: int = 200  # exact prompts whose ids are compared with a pod's; 0: none
    watch_one_in: int = 50  # prompts of which one is looked at for an early parting from one much like it; 0: none
    pod_when_suspect: bool = False  # a model whose ids keep differing: ask its pods instead
    load: LoadLimits = LoadLimits()


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
        may_be_fetched: Callable[[str], bool] = may_be_fetched,
    ) -> None:
        self.limits = limits or TokenLimits()
        self._shelf = Shelf(
            tokenizers or {},
            options=options or {},
            limits=self.limits.load,
            cache_max_bytes=self.limits.cache_max_bytes,
            compare_one_in=self.limits.compare_one_in if ask_pod is not None else 0,
            watch_one_in=self.limits.watch_one_in,
            loader=loader,
            at_hand=at_hand,
            may_be_fetched=may_be_fetched,
        )
        self._budget: PodBudget | None = None
        if ask_pod is not None:
            self._budget = PodBudget(
                ask_pod, clock=clock, in_flight_max=self.limits.pod_questions_max, deadline_s=self.limits.deadline_s
            )
        self._metrics = metrics
        self._pool = ThreadPoolExecutor(self.limits.threads, thread_name_prefix="tokens")
        self._in_pool = 0
        self._comparing: set[asyncio.Task[None]] = set()
        self.outcomes: Counter[str] = Counter()  # "exact", "partial", "asked_pod" or a FallbackReason

    async def start(self) -> None:
        """Begin to load what the settings name. Returns at once; status() tells how far it is."""
        self._shelf.start()

    async def close(self) -> None:
        """Stop loading, comparing and encoding."""
        for task in self._comparing:
            task.cancel()
        await asyncio.gather(*self._comparing, return_exceptions=True)
        await self._shelf.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def ensure(
        self,
        model: str,
        source: str | None = None,
        *,
        names: Iterable[str] = (),
        max_model_len_tokens: int | None = None,
    ) -> None:
        """A pod serves `model` (its base id), known to clients as `names`; `source` is its root path or hub id.

        Cheap and idempotent: call it whenever a model is learnt. Without a setting for the model or a name of it: a
        local folder, the hub's cache, else the hub, under the source's name or one of the model's.
        """
        self._shelf.ensure(model, source, names=names, max_model_len_tokens=max_model_len_tokens)

    def status(self) -> dict[str, Any]:
        """For /ready details and /debug: each model's tokenizer, JSON-able."""
        return {"models": self._shelf.details(), "outcomes": dict(self.outcomes)}

    def partings(self) -> dict[str, Any]:
        """For /debug/prefixes: prompts that part early from one much like them, by model."""
        return self._shelf.partings()

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
        messages = body.count(b'"role"')
        if len(body) > self.limits.body_max_bytes or messages > self.limits.messages_max:
            return NoTokens("too_long", f"{len(body)} bytes, about {messages} messages")
        found = self._shelf.find(model)
        if found is not None and found.parity.is_suspect and self.limits.pod_when_suspect:
            return await self._instead(found, model, endpoint, body)
        result = await self._local(found, endpoint, body, messages)
        if isinstance(result, NoTokens):
            # Without a tokenizer pods are not asked: it would be every request, and approximate routing serves those.
            if result.reason == "unrenderable" and found is not None and found.is_coded:
                return await self._from_pod(model, endpoint, body) or result
        elif found is not None and not result.partial and found.parity.take():
            self._compare_later(found, model, endpoint, body, result.packed)
        return result

    async def _local(
        self, found: Tokenizer | None, endpoint: str, body: bytes, messages: int
    ) -> PromptTokens | NoTokens:
        model = NoTokens("no_tokenizer", "none is set for this model") if found is None else found.renderer
        if endpoint != "/v1/completions" and isinstance(model, NoTokens):
            return model
        if len(body) > self.limits.inline_max_bytes or messages > self.limits.inline_max_messages:
            return await self._off_loop(functools.partial(render_fully, model, endpoint, body))
        rendered = render(model, endpoint, body)
        if not isinstance(rendered, TextJob):
            return rendered
        if isinstance(model, ModelRenderer) and found is not None:
            self._look_after(found, model, rendered, body)
        if rendered.missing_chars <= self.limits.inline_max_chars:
            return finish(rendered)
        return await self._off_loop(functools.partial(finish, rendered))

    def _look_after(self, found: Tokenizer, model: ModelRenderer, job: TextJob, body: bytes) -> None:
        """Count what the cache saved; now and then, in the pool, check a live request the slow way or watch it part."""
        if self._metrics is not None:
            self._metrics.token_chars.labels(source="cache").inc(job.known_chars)
            self._metrics.token_chars.labels(source="tokenizer").inc(job.missing_chars)
        if self._in_pool:
            return
        if (check := model.due_check()) is not None:
            self._pool.submit(self._checked, check)
        elif found.partings.take(len(body)):
            self._pool.submit(self._watch, found, model, body, job.text)

    def _watch(self, found: Tokenizer, model: ModelRenderer, body: bytes, text: str) -> None:
        with contextlib.suppress(ValueError):  # it was rendered a moment ago; a repaired twin may not be renderable
            cause = found.partings.examine(body, text, renderer(model))
            if cause is not None and self._metrics is not None:
                self._metrics.early_partings.labels(cause=cause).inc()

    def _checked(self, check: Callable[[], bool]) -> None:
        same = check()
        if self._metrics is not None:
            self._metrics.token_checks.labels(result="same" if same else "different").inc()

    async def _off_loop(self, work: Callable[[], PromptTokens | NoTokens]) -> PromptTokens | NoTokens:
        if self._in_pool >= self.limits.queue_requests:
            return NoTokens("busy", f"{self._in_pool} requests are being tokenized")
        self._in_pool += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(self._left_pool)
        with contextlib.suppress(TimeoutError):  # wait_for of Python 3.11 can swallow a cancellation; timeout cannot
            async with asyncio.timeout(self.limits.deadline_s):
                return await asyncio.shield(future)
        return NoTokens("deadline", f"{self.limits.deadline_s:g} s")

    def _left_pool(self, future: "asyncio.Future[PromptTokens | NoTokens]") -> None:
        self._in_pool -= 1
        if not future.cancelled():
            future.exception()  # looked at: a late failure has no reader left

    # --- the pods' own tokenizer ---

    async def _from_pod(self, model: str, endpoint: str, body: bytes) -> PromptTokens | None:
        packed = None
        if self._budget is not None:
            with contextlib.suppress(Unrenderable):
                packed = await self._budget.tokens(model, endpoint, body)
        if packed is None:
            return None
        self.outcomes["asked_pod"] += 1
        return PromptTokens(packed=packed)

    async def _instead(self, found: Tokenizer, model: str, endpoint: str, body: bytes) -> PromptTokens | NoTokens:
        """For a model whose ids keep differing: the pod's, while ours go on being compared, as one may mend it."""
        theirs = await self._from_pod(model, endpoint, body)
        if theirs is None:
            return NoTokens("tokenizer_failed", "its ids differ from the pods'")
        if found.parity.take():
            ours = await self._local(found, endpoint, body, self.limits.inline_max_messages + 1)
            if isinstance(ours, PromptTokens) and not ours.partial:
                self._record(found, first_difference(ours.packed, theirs.packed))
        return theirs

    def _compare_later(self, found: Tokenizer, model: str, endpoint: str, body: bytes, packed: bytes) -> None:
        if len(self._comparing) < self.limits.pod_questions_max:
            task = asyncio.get_running_loop().create_task(self._compare(found, model, endpoint, body, packed))
            self._comparing.add(task)
            task.add_done_callback(self._comparing.discard)

    async def _compare(self, found: Tokenizer, model: str, endpoint: str, body: bytes, packed: bytes) -> None:
        theirs = None
        if self._budget is not None:
            with contextlib.suppress(Unrenderable):
                theirs = await self._budget.tokens(model, endpoint, body)
        if theirs is not None:
            self._record(found, first_difference(packed, theirs))

    def _record(self, found: Tokenizer, difference: Difference | None) -> None:
        if self._metrics is not None:
            self._metrics.token_parity.labels(result="same" if difference is None else "different").inc()
        if difference is not None:
            log.warning("a prompt's ids differ from the pod's", extra={"fields": msgspec.to_builtins(difference)})
        if found.parity.record(difference):
            log.error(
                "the tokenizer or chat template of %s is not the one its pods use: prefixes will not be found",
                found.source,
            )
