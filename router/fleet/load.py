"""What a pod says of its own load: the few lines of vLLM's /metrics that routing needs. Pure.

May import: the standard library, msgspec.
"""

import re
from collections.abc import Mapping

import msgspec

_WANTED = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|gpu_cache_usage_perc|cache_config_info"
    rb"|prefix_cache_queries_total|prefix_cache_hits_total|lora_requests_info)(?:\{([^\n]*)\})? ([^\s]+)",
    re.MULTILINE,
)
_START = re.compile(rb"^process_start_time_seconds(?:\{[^\n]*\})? ([^\s]+)", re.MULTILINE)
_LABEL = re.compile(rb'([a-zA-Z_]+)="((?:[^"\\]|\\.)*)"')


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's (data-parallel rank's) figures. None: the pod does not publish it."""

    running_requests: int | None = None
    waiting_requests: int | None = None
    kv_held_ratio: float | None = None  # blocks held by running requests, 0..1; says nothing of what is cached
    cache_queries_tokens: float | None = None  # since its start: prompt tokens looked up in the prefix cache
    cache_hits_tokens: float | None = None  # of those, found


class LoraLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters that have requests now. One for the whole pod: vLLM does not tell its ranks apart here.

    vLLM 0.32 names the same under both: those that have given a token (v1/metrics/stats.py, LoRARequestStates).
    """

    max_loras: int  # slots on the GPU
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class LoadSample(msgspec.Struct, frozen=True, kw_only=True):
    """One scrape. `ranks` by engine index; `taken_at_s` is the reader's monotonic clock."""

    ranks: Mapping[int, RankLoad]
    taken_at_s: float
    started_at_s: float | None = None  # wall clock of the process's start: a change is a restart
    block_size_tokens: int | None = None
    kv_blocks: int | None = None
    prefix_caching: bool | None = None
    lora: LoraLoad | None = None  # None: the pod serves no adapters, or has not said


def is_stale(sample: LoadSample, *, now_s: float, stale_after_s: float) -> bool:
    """Stale means unknown: neither full nor empty."""
    return now_s - sample.taken_at_s > stale_after_s


def parse_metrics(text: bytes, *, now_s: float) -> LoadSample:
    """Read a Prometheus text page. Lines that cannot be read are as good as absent; nothing is raised."""
    ranks: dict[int, dict[str, float]] = {}
    info: dict[str, str] = {}
    adapters, adapters_at = b"", 0.0
    for name, raw_labels, raw_value in _WANTED.findall(text):
        if name == b"lora_requests_info":  # a line for each state there ever was; its value is when it was so last
            at = _number(raw_value)
            if at is not None and at >= adapters_at:
                adapters, adapters_at = raw_labels, at
            continue
        labels = _labels(raw_labels)
        if name == b"cache_config_info":
            info = info or labels
            continue
        value = _number(raw_value)
        rank = _whole(labels.get("engine", "0"))
        if value is not None and rank is not None:
            values = ranks.setdefault(rank, {})
            values[name.decode()] = values.get(name.decode(), 0.0) + value
    start = _START.search(text)
    # With a rank a pod (external load balancing) its number is that in the whole deployment: here they count from 0.
    return LoadSample(
        ranks={place: _rank(ranks[rank]) for place, rank in enumerate(sorted(ranks))},
        taken_at_s=now_s,
        started_at_s=_number(start.group(1)) if start else None,
        block_size_tokens=_whole(info.get("hash_block_size")) or _whole(info.get("block_size")),
        kv_blocks=_whole(info.get("num_gpu_blocks")),
        prefix_caching={"True": True, "False": False}.get(info.get("enable_prefix_caching", "")),
        lora=_lora(_labels(adapters)),
    )


def _labels(raw: bytes) -> dict[str, str]:
    return {k.decode(): v.decode("utf-8", "replace") for k, v in _LABEL.findall(raw)}


def _lora(labels: Mapping[str, str]) -> LoraLoad | None:
    most = _whole(labels.get("max_lora"))
    if not most:
        return None
    return LoraLoad(
        max_loras=most,
        running=_names(labels.get("running_lora_adapters", "")),
        waiting=_names(labels.get("waiting_lora_adapters", "")),
    )


def _names(joined: str) -> tuple[str, ...]:
    return tuple(name for name in joined.split(",") if name)


def _rank(values: Mapping[str, float]) -> RankLoad:
    running, waiting = values.get("num_requests_running"), values.get("num_requests_waiting")
    held = values.get("kv_cache_usage_perc", values.get("gpu_cache_usage_perc"))  # its former name
    return RankLoad(
        running_requests=None if running is None else max(int(running), 0),
        waiting_requests=None if waiting is None else max(int(waiting), 0),
        kv_held_ratio=None if held is None else min(max(held, 0.0), 1.0),
        cache_queries_tokens=values.get("prefix_cache_queries_total"),
        cache_hits_tokens=values.get("prefix_cache_hits_total"),
    )


def _number(raw: bytes) -> float | None:
    try:
        value = float(raw)
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
