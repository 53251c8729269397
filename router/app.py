"""Composition root of `warmroute serve`: builds every object, starts and stops them in order.

May import everything below it, and indexer (one process can be both).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from indexer.app import Indexer
from indexer.follow import follow
from router.admin import AdminPages
from router.core.types import WorkerAddress
from router.door import ApiKeys, Lifecycle
from router.fleet.build import build_fleet, count_pods, discovery_shown, fleet_specs, pod_tls, start_pods
from router.fleet.state import FleetState
from router.index.local import LocalView
from router.index.memory import MemoryIndex
from router.ops import Metrics
from router.policy.baselines import POLICIES
from router.policy.trial import Control, another_policy, parse_control
from router.process import begin_log, cannot_listen, open_admin, run_on_uvloop, stop_signals
from router.proxy import front
from router.proxy.drain import drain
from router.proxy.explained import explain_request
from router.proxy.handlers import build_app
from router.proxy.limits import ProxyLimits
from router.proxy.pool import Pool
from router.route import Conductor, RouteLimits
from router.settings import ServeSettings, SettingsError, pairs
from router.tls import renewed, server_tls
from router.tokenize.model import ModelOptions
from router.tokenize.service import TokenLimits, TokenService
from router.waiting import Waiting

if TYPE_CHECKING:
    from router.exchange import Exchange
    from router.index.redis import RedisIndexReader

TOKENIZER_WAIT_S = 20.0  # a tokenizer that takes longer to load does not keep the router from traffic
log = logging.getLogger("warmroute.app")
TOKENIZE_REPLY_MAX_BYTES = 32 << 20


class Parts:
    """The built objects of one router process."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self._wait_until_s = time.monotonic() + TOKENIZER_WAIT_S
        self.metrics = Metrics()
        self.fleet = build_fleet(settings)
        self.specs = fleet_specs(settings)
        self.tokens = TokenService(
            pairs(settings.tokenizer, "--tokenizer"),
            options=token_options(settings),
            limits=TokenLimits(
                deadline_s=settings.tokenize_deadline_s,
                cache_max_bytes=settings.token_cache_max_bytes,
                compare_one_in=settings.compare_tokens_one_in,
                pod_when_suspect=settings.pod_tokens_when_suspect,
            ),
            ask_pod=self._ask_tokenize if settings.ask_pod_tokenize else None,
            metrics=self.metrics,
        )
        if settings.policy not in POLICIES:
            raise SettingsError(f"--policy {settings.policy!r} is not one of {', '.join(sorted(POLICIES))}")
        control, shadow = trial(settings)
        # Memory mode: nobody else needs to know the seed. Shared index: everybody must use the same one.
        self.seed = settings.key_seed or ("" if settings.redis_url else secrets.token_hex(16))
        self.local = LocalView()
        self.indexer: Indexer | None = None
        self.index: MemoryIndex | RedisIndexReader
        if settings.redis_url:
            self.index = self._shared_index(settings.redis_url)
            self.index.expect(self._workers_with_events)
        else:
            self.index = MemoryIndex()
            self.indexer = Indexer(self.index, seed=self.seed, metrics=self.metrics)
        self.index.listen(self.local)
        self.metrics.local_view_blocks.set_function(lambda: self.local.blocks)
        self.fleet.learn_block_sizes_from(lambda worker: self.index.block_sizes().get(worker))
        self.exchange = self._exchange(settings.redis_url) if settings.redis_url and settings.exchange_ms else None
        self.waiting: Waiting | None = None  # the proxy's, once it is built
        self.conductor = Conductor(
            fleet=self.fleet,
            tokens=self.tokens,
            index=self.index,
            local=self.local,
            metrics=self.metrics,
            policies=POLICIES,
            policy=settings.policy,
            seed=self.seed,
            limits=RouteLimits(
                local_ttl_s=settings.local_ttl_s,
                local_ttl_no_events_s=settings.local_ttl_no_events_s,
                prefill_tokens_per_s=settings.prefill_tokens_per_s,
                lora_load_s=settings.lora_load_s,
                overload_prefill_s=settings.overload_prefill_s,
            ),
            peers=self.exchange.peers if self.exchange else None,
            control=control,
            shadow=shadow,
        )

    def _shared_index(self, url: str) -> RedisIndexReader:
        from router.index.redis import RedisIndexReader  # the client library only where there is a Redis

        deadline_s = self.settings.index_deadline_ms / 1000
        return RedisIndexReader(url, seed=self.seed, deadline_s=deadline_s, metrics=self.metrics)

    def _exchange(self, url: str) -> Exchange:
        from router.exchange import Exchange

        interval_s = self.settings.exchange_ms / 1000
        bookings, local = self.fleet.bookings, self.local
        return Exchange(
            url, seed=self.seed, bookings=bookings, local=local, metrics=self.metrics, interval_s=interval_s
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everything below HTTP, started in order and stopped in the reverse of it."""
        async with AsyncExitStack() as stack:
            await self.tokens.start()
            stack.push_async_callback(self.tokens.close)
            if not isinstance(self.index, MemoryIndex):
                await self.index.start()
                stack.push_async_callback(self.index.close)
            if self.exchange is not None:
                await self.exchange.start()
                stack.push_async_callback(self.exchange.close)
            if self.indexer is not None:
                await self.indexer.start()
                stack.push_async_callback(self.indexer.close)
                follow(self.fleet, self.indexer)
            count_pods(self.fleet, self.metrics)
            self.fleet.on_change(self._learn_tokenizers)
            self.fleet.on_restart(self._forget)
            await self.fleet.start()
            stack.push_async_callback(self.fleet.close)
            await start_pods(self.fleet, self.settings, self.specs, stack, self.metrics)
            yield

    def not_yet(self) -> list[str]:
        """Why requests should wait a moment: a tokenizer that was asked for is being loaded, just after the start."""
        loading = any(m["state"] == "loading" for m in self.tokens.status()["models"].values())
        return ["tokenizer_loading"] if loading and time.monotonic() < self._wait_until_s else []

    def details(self) -> dict[str, Any]:
        """What /ready and /debug/pods say beyond the pods themselves."""
        return {
            "discovery": discovery_shown(self.fleet),
            "waiting": self.waiting.status() if self.waiting else None,
            "tokenizers": self.tokens.status(),
            "routers": self.exchange.status() if self.exchange else None,
            "index": {**self.index.status(), "workers": self.indexer.status() if self.indexer else None},
        }

    def prefixes(self) -> dict[str, Any]:
        """What /debug/prefixes says: what prefixes save, and what keeps prompts from sharing one. No text of any."""
        return {"top": self.conductor.prefixes.top(), "early_partings": self.tokens.partings()}

    def _learn_tokenizers(self, state: FleetState) -> None:
        for pod in state.pods.values():
            base = pod.base_model(None)
            if base is not None:
                served = [m for m in pod.models if m.parent is None]
                lengths = [m.max_model_len_tokens for m in served if m.max_model_len_tokens]
                self.tokens.ensure(
                    base, names=[m.id for m in served], max_model_len_tokens=min(lengths) if lengths else None
                )

    async def _ask_tokenize(self, model: str, question: bytes) -> bytes | None:
        return await self.fleet.ask(model, "/tokenize", question, reply_max_bytes=TOKENIZE_REPLY_MAX_BYTES)

    def _workers_with_events(self) -> list[WorkerAddress]:
        return [w for pod in self.fleet.state.pods.values() if pod.serving and pod.publishes for w in pod.workers]

    def _forget(self, pod: str) -> None:
        known = self.fleet.state.pods.get(pod)
        for worker in known.workers if known else (WorkerAddress(pod),):
            self.local.forget(worker)


def trial(settings: ServeSettings) -> tuple[Control | None, str | None]:
    """The control group and the shadow, if any. Raises SettingsError with the cure."""
    policy, control, shadow = settings.policy, settings.control, settings.shadow
    try:
        return (
            parse_control(control, policy=policy, known=POLICIES) if control else None,
            another_policy(shadow, flag="--shadow", policy=policy, known=POLICIES) if shadow else None,
        )
    except ValueError as exc:
        raise SettingsError(str(exc)) from exc


def token_options(settings: ServeSettings) -> dict[str, ModelOptions]:
    """What the pods were started with, as far as it changes prompts, by model. Raises SettingsError."""
    common = ModelOptions(
        content_format=settings.chat_template_content_format,
        trust_request_template=settings.trust_request_chat_template,
        exclude_tools_when_none=settings.exclude_tools_when_tool_choice_none,
    )
    options = {"*": common}
    for model, file in pairs(settings.chat_template, "--chat-template").items():
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise SettingsError(f"--chat-template {model}={file} cannot be read: {exc}") from exc
        options[model] = msgspec.structs.replace(options.get(model, common), chat_template=text)
    for model, raw in pairs(settings.chat_template_kwargs, "--chat-template-kwargs").items():
        try:
            kwargs = msgspec.json.decode(raw, type=dict[str, Any])
        except msgspec.MsgspecError as exc:
            raise SettingsError(f"--chat-template-kwargs {model}=... is not a JSON object: {exc}") from exc
        options[model] = msgspec.structs.replace(options.get(model, common), default_template_kwargs=kwargs)
    return options


def proxy_limits(settings: ServeSettings) -> ProxyLimits:
    """The proxy's bounds; each is a setting of the same name. Raises SettingsError with the cure."""
    if settings.tenant_salt and not settings.tenant_header:
        raise SettingsError("--tenant-salt needs --tenant-header NAME: it says whose request it is")
    if settings.tenant_salt and not settings.key_seed:
        raise SettingsError(
            "--tenant-salt needs --key-seed SECRET, the same for all routers: it makes the salts, and another one at"
            " the next start would leave the tenants' cached blocks behind"
        )
    return ProxyLimits(**{name: getattr(settings, name) for name in ProxyLimits.__struct_fields__})


async def _serve(settings: ServeSettings) -> None:
    parts = Parts(settings)
    limits, lifecycle, keys = proxy_limits(settings), Lifecycle(), ApiKeys(settings.api_key)
    pages = AdminPages(
        metrics=parts.metrics,
        fleet=parts.fleet,
        lifecycle=lifecycle,
        conductor=parts.conductor,
        read_request=partial(explain_request, limits=limits),
        details=parts.details,
        not_yet=parts.not_yet,
        prefixes=parts.prefixes,
    )
    stop = stop_signals()
    async with AsyncExitStack() as stack:
        upstream = Pool(limits, parts.metrics, ssl_context=pod_tls(settings))
        stack.push_async_callback(upstream.close)
        app = build_app(
            parts.conductor, parts.fleet, upstream, limits, parts.metrics, pages=pages, keys=keys, lifecycle=lifecycle
        )
        stack.push_async_callback(app.close)
        parts.waiting = app.parts.waiting
        await stack.enter_async_context(parts.running())
        await open_admin(pages, settings, keys, stack)
        certificate = server_tls(settings)
        if certificate is not None:
            task = asyncio.create_task(renewed(certificate, settings), name="certificate")
            stack.callback(task.cancel)
        try:
            listener = await front.listen(app.front, host=settings.host, port=settings.port, ssl_context=certificate)
        except OSError as exc:
            raise cannot_listen("client", settings.host, settings.port, exc) from exc
        log.info("listening", extra={"fields": {"what": "client", "host": settings.host, "port": listener.port}})
        lifecycle.phase = "serving"
        await stop.wait()
        await drain(app, listener, lifecycle, delay_s=settings.drain_delay_s, grace_s=settings.drain_s)


def serve(settings: ServeSettings) -> int:
    """`warmroute serve`; returns the exit status."""
    begin_log(settings)
    return run_on_uvloop(lambda: _serve(settings))
