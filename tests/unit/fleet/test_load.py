"""The few lines of /metrics that routing needs; the page of a real engine is the oracle."""

from pathlib import Path

import msgspec
import pytest

from router.core.types import WorkerAddress
from router.fleet.fleet import Fleet
from router.fleet.load import is_stale, parse_metrics
from router.fleet.state import FleetState, PodSpec

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


def test_the_held_share_is_found_under_its_former_name_too() -> None:
    page = b'vllm:gpu_cache_usage_perc{engine="0"} 0.5\n'
    assert parse_metrics(page, now_s=0.0).ranks[0].kv_held_ratio == 0.5
    assert (
        parse_metrics(page + b'vllm:kv_cache_usage_perc{engine="0"} 0.25\n', now_s=0.0).ranks[0].kv_held_ratio == 0.25
    )


def test_a_pod_that_is_one_rank_of_many_counts_from_0_as_its_worker_does() -> None:
    page = b'vllm:num_requests_running{engine="5",model_name="a"} 2.0\nvllm:num_requests_running{engine="4"} 1.0\n'
    ranks = parse_metrics(page, now_s=0.0).ranks
    assert [ranks[r].running_requests for r in (0, 1)] == [1, 2]


def test_of_the_adapters_the_newest_line_counts() -> None:
    """vLLM makes a line for every set of adapters there ever was; the value is when it was so last."""
    page = b"""
vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""} 1.7e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="c"} 1.700000005e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a",waiting_lora_adapters=""} 1.700000001e+09
"""
    lora = parse_metrics(page, now_s=0.0).lora
    assert lora is not None
    assert (lora.max_loras, lora.running, lora.waiting) == (4, ("a", "b"), ("c",))


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"vllm:lora_requests_info{} 1.0",
        b'vllm:lora_requests_info{max_lora="x"} 1.0',
        b'vllm:lora_requests_info{max_lora="2"} NaN',
    ],
)
def test_adapters_that_cannot_be_read_are_not_known(page: bytes) -> None:
    assert parse_metrics(page, now_s=0.0).lora is None


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


def test_requests_of_others_that_wait_in_a_pod_are_work_ahead_there() -> None:
    """H60: a pod on which others queue is busy, though this router itself has nothing there."""
    fleet, worker = Fleet(clock=lambda: 0.0), WorkerAddress("p")
    fleet.set_pods([PodSpec(identity="p", name="p", url="http://p:1")])
    life = fleet._lives["p"]

    def scraped(running: int, waiting: int, own: int) -> tuple[int, int]:
        page = f'vllm:num_requests_running{{engine="0"}} {running}\nvllm:num_requests_waiting{{engine="0"}} {waiting}\n'
        life.sample, life.own_at_scrape = parse_metrics(page.encode(), now_s=0.0), {0: own}
        facts = fleet.facts(worker)
        return facts.inflight_requests, facts.prefill_tokens

    assert scraped(4, 4, own=0) == (8, 0), "before any request nobody knows how long prompts are"
    with fleet.bookings.hold(worker, prefill_tokens=10, prompt_tokens=1000):
        assert scraped(0, 1, own=1) == (1, 10), "the one that waits is ours, and booked"
        assert scraped(3, 0, own=0) == (4, 10), "those that run are past their prefill"
        work = [scraped(4, waiting, own=0)[1] for waiting in (0, 2, 8, 32)]
        assert work[0] == 10
        assert work == sorted(set(work)), "more waiting is more work"
    life.sample = None
    assert fleet.facts(worker).prefill_tokens == 0


def test_what_a_scrape_says_of_adapters_reaches_the_workers_that_it_can_be_said_of() -> None:
    fleet = Fleet(clock=lambda: 0.0)
    fleet.adapters.load_s = 1.0
    sample = parse_metrics(
        b'vllm:lora_requests_info{max_lora="1",running_lora_adapters="a",waiting_lora_adapters=""} 1.0', now_s=0.0
    )
    one, two, three = WorkerAddress("p"), WorkerAddress("q"), WorkerAddress("q", 1)
    fleet._scraped_adapters(sample, {one: ()})
    fleet._scraped_adapters(sample, {two: (), three: ()})
    assert fleet.adapters.delay_s(one, "a") == 0.0
    assert fleet.adapters.delay_s(one, "b") > 2.0, "the slot is taken"
    assert fleet.adapters.delay_s(two, "a") == fleet.adapters.delay_s(three, "a") == 1.0, (
        "which rank has it is not said"
    )


def test_what_a_worker_has_to_tell_is_known_from_its_own_counters() -> None:
    fleet, worker = Fleet(clock=lambda: 0.0), WorkerAddress("p")
    assert fleet.activity(worker) == "away", "nobody knows it"
    fleet.set_pods([PodSpec(identity="p", name="p", url="http://p:1")])
    assert fleet.activity(worker) == "away", "it takes no requests yet"
    pod = fleet.state.pods["p"]
    fleet.state = FleetState(pods={"p": msgspec.structs.replace(pod, not_ready=None)})
    assert fleet.activity(worker) == "busy", "nothing is known of it"

    def scraped(queries_tokens: int, *, caching: bool = True) -> str:
        page = f'vllm:prefix_cache_queries_total{{engine="0"}} {queries_tokens}\n'
        page += f'vllm:cache_config_info{{engine="0",enable_prefix_caching="{caching}"}} 1\n'
        fleet._lives["p"].sample = parse_metrics(page.encode(), now_s=0.0)
        return fleet.activity(worker)

    assert [scraped(n) for n in (0, 30, 5000)] == ["idle", "idle", "busy"]
    assert scraped(0, caching=False) == "busy", "without a cache it will never tell anything: that is to be told"
