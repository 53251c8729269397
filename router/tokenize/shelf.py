"""The tokenizers of the models this router serves: which model uses which, loading them, trying again.

Loading happens in worker threads and child processes (load.py); a failure is remembered, shown, and retried with
back-off by a task of the model's own, never by a request.
May import: the standard library, msgspec, and this room.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import msgspec

from router.tokenize.canary import Parity
from router.tokenize.chat import Unrenderable
from router.tokenize.export import Exported
from router.tokenize.load import LoadFailure
from router.tokenize.model import ModelOptions, ModelRenderer
from router.tokenize.partings import PartingWatch
from router.tokenize.port import NoTokens

log = logging.getLogger("warmroute.tokenize")

Loader = Callable[..., Exported]
"""(source, *, offline, deadline_s, stop) -> Exported. Raises LoadFailure."""


class LoadLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of loading, with their reasons."""

    deadline_s: float = 300.0  # a download of tokenizer files included
    retry_first_s: float = 5.0
    retry_max_s: float = 600.0


class Tokenizer(msgspec.Struct):
    """One model's tokenizer as known now. Owned by the event loop."""

    source: str
    places: tuple[str, ...]  # where it may be, the likeliest first: the source, and what the model is called
    configured: bool  # named by a setting
    options: ModelOptions
    parity: Parity
    partings: PartingWatch
    state: Literal["loading", "ready", "absent", "failed"] = "loading"
    model: ModelRenderer | None = None
    error: str = ""
    attempts: int = 0
    task: asyncio.Task[None] | None = None

    @property
    def renderer(self) -> ModelRenderer | NoTokens:
        """What renders, or why nothing does."""
        if self.model is not None:
            return self.model
        if self.state == "failed":
            return NoTokens("tokenizer_failed", self.error)
        return NoTokens("no_tokenizer", self.state)

    @property
    def is_coded(self) -> bool:
        """Does the engine encode this model's chats in code that its /tokenize shares? (It does not for harmony.)"""
        coded = self.model.unrenderable if self.model is not None else None
        return coded is not None and coded != "harmony"

    def learn_length(self, max_model_len_tokens: int | None) -> None:
        """The pods' limit, which truncate_prompt_tokens -1 means."""
        if max_model_len_tokens not in (None, self.options.max_model_len_tokens):
            self.options = msgspec.structs.replace(self.options, max_model_len_tokens=max_model_len_tokens)
            if self.model is not None:
                self.model.options = self.options

    def details(self) -> dict[str, Any]:
        """For /ready details, JSON-able."""
        return {
            "source": self.source,
            "state": self.state,
            "attempts": self.attempts,
            **({"error": self.error} if self.error else {}),
            **(self.model.details() if self.model else {}),
            **({"parity": self.parity.details()} if self.parity.compared_requests else {}),
        }


class Shelf:
    """All of them, by what a model is called. Create it anywhere, `start()` it in the event loop that uses it."""

    def __init__(
        self,
        tokenizers: Mapping[str, str],
        *,
        options: Mapping[str, ModelOptions],
        limits: LoadLimits,
        cache_max_bytes: int,
        compare_one_in: int,
        watch_one_in: int,
        loader: Loader,
        at_hand: Callable[[str], bool],
        may_be_fetched: Callable[[str], bool],
    ) -> None:
        self._configured = dict(tokenizers)
        self._options = dict(options)
        self._limits = limits
        self._cache_max_bytes = cache_max_bytes
        self._compare_one_in = compare_one_in
        self._watch_one_in = watch_one_in
        self._load = loader
        self._at_hand = at_hand
        self._may_be_fetched = may_be_fetched
        self._tokenizers: dict[str, Tokenizer] = {}  # by configured name or source
        self._names: dict[str, str] = {}  # base id or served name -> key of _tokenizers
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer-load")
        self._stop = threading.Event()
        self._started = False

    def start(self) -> None:
        """Begin to load what the settings name."""
        self._started = True
        for name, source in self._configured.items():
            self._names[name] = name
            self._add(name, source, configured=True, names=(name,))

    async def close(self) -> None:
        """Stop loading; a child process that is still at it is killed."""
        self._stop.set()
        tasks = [t.task for t in self._tokenizers.values() if t.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def find(self, model: str) -> Tokenizer | None:
        """The tokenizer of a base model id (or configured name)."""
        return self._tokenizers.get(self._names.get(model, ""))

    def ensure(self, model: str, source: str | None, *, names: Iterable[str], max_model_len_tokens: int | None) -> None:
        """See TokenService.ensure."""
        if not self._started:
            return
        if model not in self._names:
            chosen = next((name for name in (model, *names) if name in self._configured), None)
            self._names[model] = chosen or source or model
            if chosen is None:
                self._add(source or model, source or model, configured=False, names=(model, *names))
        self._tokenizers[self._names[model]].learn_length(max_model_len_tokens)

    def details(self) -> dict[str, Any]:
        """Each tokenizer and the models it serves, JSON-able."""
        return {
            key: {**found.details(), "models": sorted(name for name, k in self._names.items() if k == key)}
            for key, found in self._tokenizers.items()
        }

    def partings(self) -> dict[str, Any]:
        """What was seen of early partings, JSON-able."""
        return {key: found.partings.details() for key, found in self._tokenizers.items()}

    def _add(self, key: str, source: str, *, configured: bool, names: Iterable[str]) -> None:
        if key in self._tokenizers:
            return
        named = (self._options[name] for name in (*names, key, "*") if name in self._options)
        made = self._tokenizers[key] = Tokenizer(
            source=source,
            places=tuple(dict.fromkeys((source, *names))),
            configured=configured,
            options=next(named, ModelOptions()),
            parity=Parity(one_in=self._compare_one_in),
            partings=PartingWatch(one_in=self._watch_one_in),
        )
        model = next(iter(names), key)
        made.task = asyncio.get_running_loop().create_task(self._keep_loading(made, model), name=f"tokenizer {key}")

    async def _keep_loading(self, found: Tokenizer, name: str) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                known, offline = await loop.run_in_executor(self._threads, self._look_for, found)
                if known:
                    model = await loop.run_in_executor(self._threads, self._build, found, offline)
                    model.options = found.options  # they may have been learnt meanwhile
                    found.model, found.state, found.error = model, "ready", ""
                    found.attempts += 1
                    return
                if found.state != "absent":
                    log.warning("tokenizer %s: not on this machine; %s", found.source, _cure(name))
                found.state = "absent"
            except (LoadFailure, Unrenderable, ValueError) as exc:
                found.state, found.error = "failed", str(exc)
                log.warning("tokenizer %s: %s; %s", found.source, found.error, _cure(name))
            wait_s = self._limits.retry_first_s * 2.0 ** min(found.attempts, 16)
            found.attempts += 1
            await asyncio.sleep(min(wait_s, self._limits.retry_max_s))

    def _look_for(self, found: Tokenizer) -> tuple[bool, bool]:
        """Is there anything to load, and without the hub? A root that is a path of the pod's own says nothing here."""
        if found.configured:
            return True, False
        here = next(filter(self._at_hand, found.places), None)
        there = next(filter(self._may_be_fetched, found.places), None)
        offline = there is None or (here is not None and not found.attempts)  # in part only? Then the hub is next
        source = here if offline else there
        found.source = source or found.source
        return source is not None, offline

    def _build(self, found: Tokenizer, offline: bool) -> ModelRenderer:
        exported = self._load(found.source, offline=offline, deadline_s=self._limits.deadline_s, stop=self._stop)
        return ModelRenderer(exported, found.options, cache_max_bytes=self._cache_max_bytes)


def _cure(name: str) -> str:
    """What to do about a tokenizer that is not there."""
    return (
        f"--tokenizer {name}=PATH (a folder with tokenizer.json, or a hub id) says where it is; until it is loaded,"
        " prompts are routed without exact tokens"
    )
