"""What the load test asks the pods themselves: their counters, an empty cache, whether they are emulated.

May import: the standard library, aiohttp, loadtest.samples.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from loadtest.samples import PodCounters

_NAMES = {
    "queried_tokens": "vllm:prefix_cache_queries_total",
    "hit_tokens": "vllm:prefix_cache_hits_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generated_tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
    "requests": "vllm:request_success_total",
}
TIMEOUT = aiohttp.ClientTimeout(total=10.0)


def parse_counters(text: str) -> PodCounters:
    """The counters of one pod, summed over its engines. What a pod does not tell counts as 0."""
    sums = dict.fromkeys(_NAMES, 0.0)
    by_metric = {metric: name for name, metric in _NAMES.items()}
    for line in text.splitlines():
        metric, brace, rest = line.partition("{")
        name = by_metric.get(metric if brace else line.partition(" ")[0])
        if name is not None:
            value = (rest if brace else line).rpartition(" ")[2]
            sums[name] += float(value)
    return PodCounters(**sums)


def difference(before: Mapping[str, PodCounters], after: Mapping[str, PodCounters]) -> dict[str, PodCounters]:
    """What was counted in between. A pod that restarted meanwhile counts from its new beginning."""
    out: dict[str, PodCounters] = {}
    for pod, now in after.items():
        then = msgspec.structs.asdict(before[pod]) if pod in before else {}
        fields = msgspec.structs.asdict(now)
        deltas = {k: v - then.get(k, 0.0) for k, v in fields.items()}
        out[pod] = PodCounters(**(fields if any(d < 0 for d in deltas.values()) else deltas))
    return out


class Pods:
    """The pods behind the router, as far as the caller named them. Use as an async context manager."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = tuple(u.split(",")[0].rstrip("/") for u in urls)

    async def __aenter__(self) -> "Pods":
        self._http = aiohttp.ClientSession(timeout=TIMEOUT)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    async def counters(self) -> dict[str, PodCounters]:
        """By URL; a pod that does not answer is left out."""
        texts = await asyncio.gather(*(self._get(u + "/metrics") for u in self.urls))
        return {u: parse_counters(t) for u, t in zip(self.urls, texts, strict=True) if t is not None}

    async def reset(self, model: str, *, patience_s: float = 30.0) -> bool:
        """Empty every cache (vLLM's dev mode). False when a pod does not allow it or still holds blocks.

        vLLM tells of a cleared cache with its next step only, so each pod is asked for one token afterwards.
        """
        if not self.urls:
            return False
        done = await asyncio.gather(*(self._reset_one(u, model, patience_s) for u in self.urls))
        return all(done)

    async def emulated(self) -> list[dict[str, Any]]:
        """GET /emulated/state of each pod that has it."""
        texts = await asyncio.gather(*(self._get(u + "/emulated/state") for u in self.urls))
        return [json.loads(t) for t in texts if t is not None]

    async def _reset_one(self, url: str, model: str, patience_s: float) -> bool:
        async with asyncio.timeout(patience_s):
            while True:
                try:
                    async with self._http.post(url + "/reset_prefix_cache") as reply:
                        if reply.status != 200:
                            return False
                        text = await reply.text()
                except (aiohttp.ClientError, TimeoutError):
                    return False
                if not text or json.loads(text).get("success", True):
                    break
                await asyncio.sleep(0.2)  # blocks are held until the last stream has ended
        body = {"model": model, "prompt": "a", "max_tokens": 1}
        try:
            async with self._http.post(url + "/v1/completions", json=body) as reply:
                await reply.read()
        except (aiohttp.ClientError, TimeoutError):
            return False
        return True

    async def _get(self, url: str) -> str | None:
        try:
            async with self._http.get(url) as reply:
                return await reply.text() if reply.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None
