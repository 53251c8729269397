"""A conductor and a fleet with no cleverness: pods in the order given, bookings real."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

from router.core.types import WorkerAddress
from router.fleet.bookings import Bookings
from router.fleet.breaker import Breaker
from router.fleet.state import ModelEntry, Pod, PodSpec
from router.policy.pick import Refused
from router.policy.retry import FailureKind
from router.route import Choice, Prepared, RouteRequest
from router.tokenize.port import PromptTokens


class FakeFleet:
    """Fixed pods. `down` are refused by choose(); a failed connect puts a worker there, as the real fleet does."""

    def __init__(self, urls: Sequence[str], *, models: Sequence[str] = ("m",), heard: bool = True) -> None:
        self.models = list(models)
        self.heard = heard
        self.max_model_len_tokens: int | None = None
        self.loaded_since: list[str] = []  # models that asking the pods again would find
        self.urls = list(urls)
        self.bookings = Bookings()
        self.failures: Counter[str] = Counter()
        self.successes = 0
        self.doubts = 0
        self.down: set[WorkerAddress] = set()
        self.breakers: dict[WorkerAddress, Breaker] = {}
        self._gone: dict[str, asyncio.Event] = {}

    def pods(self) -> Sequence[Pod]:
        return [
            Pod(
                spec=PodSpec(identity=url, name=url, url=url),
                models=tuple(ModelEntry(id=m, max_model_len_tokens=self.max_model_len_tokens) for m in self.models),
                not_ready=None,
            )
            for url in self.urls
        ]

    def serves(self, model: str | None) -> bool:
        return self.heard and (model is None or model in self.models)

    async def serves_by_now(self, model: str | None) -> bool:
        self.models += self.loaded_since
        return self.serves(model)

    def heard_models(self) -> bool:
        return self.heard

    def model_list(self) -> list[dict[str, Any]]:
        return [{"id": m, "object": "model"} for m in sorted(self.models)]

    def sent(self, worker: WorkerAddress) -> None:
        if worker in self.breakers:
            self.breakers[worker].sent(now_s=asyncio.get_running_loop().time())

    def failed(self, worker: WorkerAddress, kind: FailureKind) -> None:
        self.failures[kind] += 1
        if kind == "connect":
            self.down.add(worker)
        self.breakers.setdefault(worker, Breaker()).failed(kind, now_s=asyncio.get_running_loop().time())

    def doubted(self, worker: WorkerAddress) -> None:
        self.doubts += 1

    def succeeded(self, worker: WorkerAddress) -> None:
        self.successes += 1
        if worker in self.breakers:
            self.breakers[worker].succeeded(now_s=asyncio.get_running_loop().time())

    def allows(self, worker: WorkerAddress) -> bool:
        breaker = self.breakers.get(worker)
        return breaker is None or breaker.allows(now_s=asyncio.get_running_loop().time())

    def gone(self, pod: str) -> asyncio.Event:
        return self._gone.setdefault(pod, asyncio.Event())

    def status(self) -> list[dict[str, Any]]:
        return [
            {"pod": p.spec.name, "ready": p.workers[0] not in self.down, "reason": None, "workers": []}
            for p in self.pods()
        ]


class FakeConductor:
    """Takes the first pod that is up and not excluded; `spread` takes them in turn."""

    def __init__(self, fleet: FakeFleet, *, spread: bool = False, prompt_tokens: int | None = None) -> None:
        self.fleet = fleet
        self.spread = spread
        self.prompt_tokens = prompt_tokens
        self.asked: list[RouteRequest] = []
        self.voided: list[WorkerAddress] = []
        self.refuse_with: Refused | None = None
        self._turn = 0

    def has_policy(self, name: str) -> bool:
        return name in ("prefix", "random")

    async def prepare(self, request: RouteRequest) -> Prepared:
        self.asked.append(request)
        tokens = None if self.prompt_tokens is None else PromptTokens(packed=bytes(4 * self.prompt_tokens))
        return Prepared(request=request, tokens=tokens, chains={}, sequence=len(self.asked))

    def choose(self, prepared: Prepared, *, exclude: Set[WorkerAddress] = frozenset()) -> Choice | Refused:
        if self.refuse_with is not None:
            return self.refuse_with
        able = [
            (p, w)
            for p in self.fleet.pods()
            for w in p.workers
            if w not in exclude and w not in self.fleet.down and self.fleet.allows(w)
        ]
        if not able:
            return Refused("no_worker")
        pod, worker = able[self._turn % len(able)] if self.spread else able[0]
        self._turn += 1
        return Choice(
            worker=worker,
            url=pod.spec.url,
            name=pod.spec.name,
            data_parallel_rank=None,
            booking=self.fleet.bookings.hold(
                worker, prefill_tokens=7, prompt_tokens=9, on_void=lambda: self.voided.append(worker)
            ),
            policy=prepared.request.policy or "prefix",
            reason="load",
            prompt_tokens=self.prompt_tokens,
            matched_tokens=None if self.prompt_tokens is None else 0,
            indexed_tokens=None if self.prompt_tokens is None else 0,
        )

    async def explain(self, request: RouteRequest) -> dict[str, Any]:
        return {"endpoint": request.endpoint, "model": request.model, "workers": []}
