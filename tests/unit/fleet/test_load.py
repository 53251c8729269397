"""The few lines of /metrics that routing needs; the page of a real engine is the oracle."""

from pathlib import Path

import pytest

from router.fleet.load import is_stale, parse_metrics

RECORDED = Path(__file__).parents[2] / "data" / "recorded" / "default" / "metrics.txt"


def test_a_real_page() -> None:
    sample = parse_metrics(RECORDED.read_bytes(), now_s=5.0)
    assert sample.ranks[0].running_requests == 0
    assert (sample.block_size_tokens, sample.kv_blocks, sample.prefix_caching) == (32, 300, True)
    assert sample.started_at_s is not None


def test_ranks_are_kept_apart_and_models_added() -> None:
    page = b"""
vllm:num_requests_running{engine="0",model_name="a"} 2.0
vllm:num_requests_running{engine="0",model_name="b"} 1.0
vllm:num_requests_running{engine="1",model_name="a"} 5.0
vllm:num_requests_waiting{engine="1",model_name="a \\"x\\" "} 7.0
vllm:kv_cache_usage_perc{engine="1",model_name="a"} 0.25
"""
    ranks = parse_metrics(page, now_s=0.0).ranks
    assert (ranks[0].running_requests, ranks[1].running_requests) == (3, 5)
    assert (ranks[0].waiting_requests, ranks[1].waiting_requests, ranks[1].kv_held_ratio) == (None, 7, 0.25)


@pytest.mark.parametrize(
    "page",
    [b"", b"<html>", b"vllm:num_requests_running{} NaN", b"vllm:num_requests_running +Inf\n", b"\xff\xfe", b"vllm:x{"],
)
def test_what_cannot_be_read_is_absent(page: bytes) -> None:
    sample = parse_metrics(page, now_s=0.0)
    assert all(rank.running_requests is None for rank in sample.ranks.values())


def test_old_figures_are_unknown() -> None:
    sample = parse_metrics(b"", now_s=10.0)
    assert not is_stale(sample, now_s=19.0, stale_after_s=10.0)
    assert is_stale(sample, now_s=21.0, stale_after_s=10.0)
