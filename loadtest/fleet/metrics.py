"""An emulated pod's /metrics in vLLM's names. Pure.

May import: the standard library, loadtest.fleet.pod.
"""

from loadtest.fleet.pod import TTFT_BUCKETS_S, EmulatedPod


def render(pod: EmulatedPod) -> str:
    """The text exposition, with vLLM 0.32's names and labels; only what a router or a load test reads."""
    c, g = pod.config, pod.gauges()
    labels = f'engine="0",model_name="{c.model}"'
    lines: list[str] = []

    def add(name: str, kind: str, value: float, more: str = "") -> None:
        family = name.removesuffix("_total") if kind == "counter" else name
        if not more or not any(line.startswith(f"# TYPE {name} ") for line in lines[-8:]):
            lines.append(f"# HELP {name} Emulated: {family}.")
            lines.append(f"# TYPE {name} {kind}")
        lines.append(f"{name}{{{labels}{more}}} {float(value)!r}")

    lines.append("# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.")
    lines.append("# TYPE process_start_time_seconds gauge")
    lines.append(f"process_start_time_seconds {pod.life.started_unix_s!r}")
    add("vllm:num_requests_running", "gauge", g.running)
    add("vllm:num_requests_waiting", "gauge", g.waiting)
    add("vllm:num_requests_waiting_by_reason", "gauge", g.waiting, ',reason="capacity"')
    add("vllm:num_requests_waiting_by_reason", "gauge", 0, ',reason="deferred"')
    add("vllm:kv_cache_usage_perc", "gauge", g.kv_usage_ratio)
    add("vllm:prefix_cache_queries_total", "counter", g.prefix_queries_tokens)
    add("vllm:prefix_cache_hits_total", "counter", g.prefix_hits_tokens)
    add("vllm:num_preemptions_total", "counter", g.preemptions)
    add("vllm:prompt_tokens_total", "counter", g.prompt_tokens)
    add("vllm:generation_tokens_total", "counter", g.generation_tokens)
    add("vllm:request_success_total", "counter", g.finished_requests, ',finished_reason="length"')
    add("vllm:request_success_total", "counter", g.aborted_requests, ',finished_reason="abort"')
    add("vllm:engine_sleep_state", "gauge", 1, ',sleep_state="awake"')
    lines += _ttft(pod, labels)
    p = c.profile
    if p.max_loras:  # as vLLM 0.32: both labels name the adapters that run, and one that only waits is not told
        names = ",".join(g.running_adapters)
        text = f'max_lora="{p.max_loras}",running_lora_adapters="{names}",waiting_lora_adapters="{names}"'
        lines += [
            "# HELP vllm:lora_requests_info Running stats on lora requests.",
            "# TYPE vllm:lora_requests_info gauge",
        ]
        lines.append(f"vllm:lora_requests_info{{{text}}} {pod.life.started_unix_s!r}")
    info = {
        "block_size": p.block_size_tokens,
        "enable_prefix_caching": True,
        "engine": 0,
        "hash_block_size": None,
        "kv_cache_size_tokens": p.kv_cache_tokens,
        "num_gpu_blocks": p.num_blocks,
        "prefix_caching_hash_algo": "emulated",
    }
    text = ",".join(f'{k}="{v}"' for k, v in info.items())
    lines += ["# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig"]
    lines += ["# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{text}}} 1.0", ""]
    return "\n".join(lines)


def _ttft(pod: EmulatedPod, labels: str) -> list[str]:
    name, total = "vllm:time_to_first_token_seconds", 0
    lines = [f"# HELP {name} Histogram of time to first token in (virtual) seconds.", f"# TYPE {name} histogram"]
    for bound, count in zip((*TTFT_BUCKETS_S, "+Inf"), pod.ttft_counts, strict=True):
        total += count
        lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {float(total)}')
    return [*lines, f"{name}_count{{{labels}}} {float(total)}", f"{name}_sum{{{labels}}} {pod.ttft_sum_s!r}"]
