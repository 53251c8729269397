"""The default policy as a specification: which worker, in which situation."""

import itertools
from collections import Counter
from random import Random

import msgspec
import pytest

from router.core.types import WorkerAddress
from router.policy.pick import (
    ATTENTION_EQUAL_CONTEXT_TOKENS,
    Candidate,
    Chosen,
    Costs,
    Refused,
    RoutingRequest,
    pick,
    prefill_tokens,
)


def worker(name: str, **kw: object) -> Candidate:
    return Candidate(worker=WorkerAddress(name), **{"matched_tokens": 0, **kw})  # type: ignore[arg-type]


def choose(candidates: list[Candidate], seed: int = 1, **request: float) -> str:
    asked = RoutingRequest(**{"prompt_tokens": 7000, **request})  # type: ignore[arg-type]
    decision = pick(candidates, asked, Costs(), Random(seed))
    assert isinstance(decision, Chosen)
    return decision.worker.pod


COLD_IDLE = worker("cold-idle")
WARM_IDLE = worker("warm-idle", matched_tokens=6900)


def warm_busy(requests: int) -> Candidate:
    return worker("warm-busy", matched_tokens=6900, inflight_requests=requests, booked_prefill_tokens=300 * requests)


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        pytest.param([COLD_IDLE, WARM_IDLE], "warm-idle", id="a hit wins among the idle"),
        pytest.param([COLD_IDLE, warm_busy(8)], "warm-busy", id="a whole hit outweighs a queue"),
        pytest.param([COLD_IDLE, warm_busy(200)], "cold-idle", id="but not any queue"),
        pytest.param(
            [worker("A", matched_tokens=32), worker("B", matched_tokens=160)], "B", id="the longer match wins (H61)"
        ),
        pytest.param([worker("A", inflight_requests=20), worker("B")], "B", id="a miss goes to the least loaded (H59)"),
        pytest.param(
            [worker("A", booked_prefill_tokens=20_000), worker("B")], "B", id="booked prefill counts before any scrape"
        ),
        pytest.param(
            [worker("A", placed_tokens=90_000), worker("B", placed_tokens=10_000)],
            "B",
            id="a prompt nobody holds goes where least was placed",
        ),
        pytest.param(
            [worker("A", placed_tokens=90_000), worker("B", placed_tokens=10_000, inflight_requests=4)],
            "B",
            id="also when a few are decoding there",
        ),
        pytest.param(
            [worker("A", placed_tokens=90_000), worker("B", placed_tokens=10_000, inflight_requests=5)],
            "A",
            id="but not when many are",
        ),
        pytest.param(
            [worker("A", placed_tokens=90_000), worker("B", placed_tokens=10_000, booked_prefill_tokens=7000)],
            "A",
            id="nor behind a prefill as long as its own",
        ),
        pytest.param(
            [worker("away", adapter_s=0.5), worker("loaded", inflight_requests=4)],
            "loaded",
            id="a request goes where its adapter is loaded",
        ),
        pytest.param(
            [worker("away", adapter_s=0.5), worker("loaded", inflight_requests=60, booked_prefill_tokens=9000)],
            "away",
            id="but another copy pays when that is busy",
        ),
        pytest.param(
            [worker("away", placed_tokens=0, adapter_s=0.5), worker("loaded", placed_tokens=90_000)],
            "loaded",
            id="also when least was placed elsewhere",
        ),
        pytest.param(
            [worker("away", matched_tokens=6900, adapter_s=5.0), worker("loaded", matched_tokens=6900)],
            "loaded",
            id="blocks that outlived their adapter are worth less",
        ),
        pytest.param([worker("down", ready=False, matched_tokens=6900), COLD_IDLE], "cold-idle", id="ready ones only"),
        pytest.param(
            [worker("short", matched_tokens=6900, max_model_len_tokens=4096), COLD_IDLE],
            "cold-idle",
            id="the context must fit",
        ),
    ],
)
def test_which_worker(candidates: list[Candidate], expected: str) -> None:
    assert {choose(candidates, seed=s) for s in range(20)} == {expected}


def test_one_switch_point_as_the_warm_worker_gets_busier() -> None:
    """H60: the choice leaves the warm worker once and does not come back."""
    chosen = [choose([COLD_IDLE, warm_busy(n)]) for n in range(0, 400, 4)]
    switches = sum(a != b for a, b in itertools.pairwise(chosen))
    assert (chosen[0], chosen[-1], switches) == ("warm-busy", "cold-idle", 1)


def test_a_crowd_takes_the_price_off_one_more_copy() -> None:
    # uncrowded, 12 requests on the warm worker are still better than a copy; among 200 siblings a copy pays
    pair = [COLD_IDLE, warm_busy(12)]
    assert choose(pair) == "warm-busy"
    assert choose(pair, crowd_requests=200) == "cold-idle"


def test_a_crowd_is_shared_by_the_copies_there_are() -> None:
    copies = [msgspec.structs.replace(warm_busy(12), worker=WorkerAddress(f"warm-{i}")) for i in range(8)]
    assert choose([COLD_IDLE, copies[0]], crowd_requests=16) == "cold-idle", "a second copy pays"
    assert choose([COLD_IDLE, *copies], crowd_requests=16) != "cold-idle", "a ninth does not"


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param({"prompt_tokens": 100}, id="nobody holds any of it"),
        pytest.param({"prompt_tokens": 0}, id="no ids are known"),
        pytest.param({"prompt_tokens": 16_000}, id="all hold a part of it"),
    ],
)
def test_ties_are_uniform(request_: dict[str, int]) -> None:
    """H65: chi-square with 7 degrees of freedom over 8,000 choices, 0.1 % level."""
    rng = Random(7)
    held = 8000 if request_["prompt_tokens"] > 8000 else 0
    fleet = [worker(n, matched_tokens=held) for n in "abcdefgh"]
    counts: Counter[str] = Counter()
    for _ in range(8000):
        decision = pick(fleet, RoutingRequest(**request_), Costs(), rng)  # type: ignore[arg-type]
        assert isinstance(decision, Chosen)
        counts[decision.worker.pod] += 1
    assert sum((counts[n] - 1000) ** 2 / 1000 for n in "abcdefgh") < 24.32


def at_home(candidates: list[Candidate], prefix: bytes = b"prefix") -> str:
    decision = pick(candidates, RoutingRequest(prompt_tokens=7000, affinity=prefix), Costs(), Random(1))
    assert isinstance(decision, Chosen)
    return decision.worker.pod


def test_a_prompt_that_many_hold_whole_goes_to_its_first_quiet_holder() -> None:
    """What is left of a load that was once high uses few of the copies that it made."""
    fleet = [worker(n, matched_tokens=6900) for n in "abcd"]
    first = at_home(fleet)
    assert {at_home(fleet[i:] + fleet[:i]) for i in range(4)} == {first}, "the same for every router"

    def with_first(**load: int) -> list[Candidate]:
        return [worker(n, matched_tokens=6900, **(load if n == first else {})) for n in "abcd"]

    assert at_home(with_first(inflight_requests=8)) == first
    assert at_home(with_first(inflight_requests=9)) != first, "it is not quiet"
    assert at_home(with_first(booked_prefill_tokens=1)) != first, "something is ahead there"
    assert at_home(with_first(adapter_s=0.1)) != first, "its adapter is not there"
    assert at_home([c for c in fleet if c.worker.pod != first] + [worker(first, matched_tokens=6400)]) != first


def test_the_homes_of_many_prompts_are_all_workers_alike() -> None:
    """Chi-square with 7 degrees of freedom, 0.1 % level."""
    fleet = [worker(n, matched_tokens=6900) for n in "abcdefgh"]
    counts = Counter(at_home(fleet, prefix=i.to_bytes(8, "big")) for i in range(4000))
    assert sum((counts[n] - 500) ** 2 / 500 for n in "abcdefgh") < 24.32


@pytest.mark.parametrize(
    ("booked_prefill_tokens", "expected"),
    [
        pytest.param(36_000, "bare", id="its queue is over before the cheapest would have computed this prompt too"),
        pytest.param(38_000, "full", id="it is not"),
    ],
)
def test_a_prompt_is_not_placed_where_it_would_wait_much_longer(booked_prefill_tokens: int, expected: str) -> None:
    full = worker("full", placed_tokens=90_000, booked_prefill_tokens=30_000, inflight_requests=5)
    bare = worker("bare", booked_prefill_tokens=booked_prefill_tokens, inflight_requests=5)
    assert choose([full, bare]) == expected


def test_unknown_prompts_are_spread_by_requests_in_flight() -> None:
    assert choose([worker("A", inflight_requests=3), worker("B", inflight_requests=2)], prompt_tokens=0) == "B"


@pytest.mark.parametrize(
    ("candidates", "reason"),
    [
        pytest.param([], "no_worker", id="an empty fleet (H68)"),
        pytest.param([worker("A", ready=False)], "no_worker", id="nobody ready"),
        pytest.param([worker("A", max_model_len_tokens=100)], "too_long", id="too long for everybody"),
    ],
)
def test_refusals_say_why(candidates: list[Candidate], reason: str) -> None:
    assert pick(candidates, RoutingRequest(prompt_tokens=7000), Costs(), Random(1)) == Refused(reason)  # type: ignore[arg-type]


@pytest.mark.parametrize(("prompt", "uncached"), [(1, 1), (6000, 6000), (60_000, 10_000), (100_000, 100_000)])
def test_work_is_what_each_token_costs_at_its_place(prompt: int, uncached: int) -> None:
    """Counted token by token: one for the linear layers, and its share of attention over all before it."""
    one_by_one = sum(1 + (i + 0.5) / ATTENTION_EQUAL_CONTEXT_TOKENS for i in range(prompt - uncached, prompt))
    assert prefill_tokens(prompt, uncached) == pytest.approx(one_by_one)


def test_the_end_of_a_long_prompt_is_dearer_than_a_short_prompt() -> None:
    """10,000 tokens behind 50,000 that are held are more work than 20,000 with nothing before them."""
    long, short = (round(prefill_tokens(*lengths)) for lengths in ((60_000, 10_000), (20_000, 20_000)))
    behind_long, behind_short = worker("long", booked_prefill_tokens=long), worker("short", booked_prefill_tokens=short)
    assert choose([behind_long, behind_short], prompt_tokens=500) == "short"
