"""The rules for comparison, each as a table: which worker, in which situation."""

from collections import Counter
from random import Random

import pytest

from router.core.types import WorkerAddress
from router.policy.baselines import POLICIES
from router.policy.pick import Candidate, Chosen, Costs, Refused, RoutingRequest


def worker(name: str, **kw: object) -> Candidate:
    return Candidate(worker=WorkerAddress(name), **{"matched_tokens": 0, **kw})  # type: ignore[arg-type]


def choices(rule: str, candidates: list[Candidate], **request: object) -> set[str]:
    found = set()
    for seed in range(40):
        asked = RoutingRequest(**{"prompt_tokens": 7000, "affinity": b"first block", **request})  # type: ignore[arg-type]
        decision = POLICIES[rule](candidates, asked, Costs(), Random(seed))
        assert isinstance(decision, Chosen)
        found.add(decision.worker.pod)
    return found


A_WARM_BUSY = worker("A", matched_tokens=6900, inflight_requests=30, booked_prefill_tokens=9000)
B_COLD_IDLE = worker("B")


@pytest.mark.parametrize(
    ("rule", "candidates", "expected"),
    [
        pytest.param("least-loaded", [A_WARM_BUSY, B_COLD_IDLE], {"B"}, id="least-loaded ignores the cache"),
        pytest.param(
            "least-loaded",
            [worker("A", inflight_requests=2, booked_prefill_tokens=9), worker("B", inflight_requests=2)],
            {"B"},
            id="least-loaded: then booked prefill",
        ),
        pytest.param("longest-match", [A_WARM_BUSY, B_COLD_IDLE], {"A"}, id="longest-match ignores the load"),
        pytest.param("greedy-ttft", [A_WARM_BUSY, B_COLD_IDLE], {"B"}, id="greedy: 9,100 tokens ahead lose to 7,000"),
        pytest.param(
            "greedy-ttft",
            [worker("A", booked_prefill_tokens=1000, prefill_tokens_per_s=40_000.0), B_COLD_IDLE],
            {"A"},
            id="greedy knows who is fast",
        ),
        pytest.param("lmetric", [A_WARM_BUSY, B_COLD_IDLE], {"B"}, id="lmetric multiplies tokens by the batch"),
        pytest.param(
            "lmetric",
            [worker("A", matched_tokens=6900, inflight_requests=30), worker("B", inflight_requests=1)],
            {"A"},
            id="lmetric: 100 x 31 against 7,000 x 2",
        ),
        pytest.param("weights", [worker("A", matched_tokens=6900), B_COLD_IDLE], {"A"}, id="weights: a match wins"),
        pytest.param(
            "weights",
            [worker("A", matched_tokens=1000, inflight_requests=200, kv_held_ratio=0.9), B_COLD_IDLE],
            {"B"},
            id="weights: a small match does not outweigh a full queue",
        ),
        pytest.param(
            "precise-3-2-2",
            [worker("A", matched_tokens=6400), worker("B", matched_tokens=6336)],
            {"A"},
            id="precise: one block is worth 3 (its own normalisation)",
        ),
        pytest.param(
            "precise-3-2-2",
            [worker("A", matched_tokens=6400, waiting_requests=1, kv_held_ratio=0.6), worker("B")],
            {"B"},
            id="precise: one waiting request is worth 2 (its own normalisation)",
        ),
        pytest.param(
            "sticky-until-saturated",
            [worker("A", matched_tokens=6900, booked_prefill_tokens=200_000), B_COLD_IDLE],
            {"A"},
            id="sticky: 10 s are waited",
        ),
        pytest.param(
            "sticky-until-saturated",
            [worker("A", matched_tokens=6900, booked_prefill_tokens=400_000), B_COLD_IDLE],
            {"B"},
            id="sticky: 20 s are not",
        ),
        pytest.param(
            "sticky-until-saturated",
            [worker("A", matched_tokens=5000, booked_prefill_tokens=9000), B_COLD_IDLE],
            {"B"},
            id="sticky: 71 % is not holding",
        ),
        pytest.param("cache-aware", [A_WARM_BUSY, B_COLD_IDLE], {"A"}, id="cache-aware: a match while loads are even"),
        pytest.param(
            "cache-aware",
            [worker("A", matched_tokens=6900, inflight_requests=80), worker("B", inflight_requests=4)],
            {"B"},
            id="cache-aware: the shortest queue while they are not",
        ),
        pytest.param(
            "cache-aware",
            [worker("A", matched_tokens=700, placed_tokens=9000), worker("B", placed_tokens=1000)],
            {"B"},
            id="cache-aware: a small match goes where least was sent",
        ),
    ],
)
def test_which_worker(rule: str, candidates: list[Candidate], expected: set[str]) -> None:
    assert choices(rule, candidates) == expected


@pytest.mark.parametrize("rule", sorted(POLICIES))
def test_only_the_fit_are_chosen(rule: str) -> None:
    fleet = [worker("down", ready=False, matched_tokens=6900), worker("short", max_model_len_tokens=100), B_COLD_IDLE]
    assert choices(rule, fleet) == {"B"}


@pytest.mark.parametrize("rule", sorted(POLICIES))
@pytest.mark.parametrize(
    ("fleet", "reason"),
    [([], "no_worker"), ([worker("A", ready=False)], "no_worker"), ([worker("A", max_model_len_tokens=9)], "too_long")],
)
def test_nobody_fits(rule: str, fleet: list[Candidate], reason: str) -> None:
    decision = POLICIES[rule](fleet, RoutingRequest(prompt_tokens=7000), Costs(), Random(1))
    assert decision == Refused(reason)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", sorted(set(POLICIES) - {"round-robin", "consistent-hash"}))
def test_ties_are_broken_evenly(rule: str) -> None:
    fleet = [worker(name) for name in "ABCD"]
    rng = Random(7)
    chosen: Counter[str] = Counter()
    for _ in range(400):
        decision = POLICIES[rule](fleet, RoutingRequest(prompt_tokens=7000), Costs(), rng)
        assert isinstance(decision, Chosen)
        chosen[decision.worker.pod] += 1
    chi_square = sum((n - 100) ** 2 / 100 for n in (chosen[name] for name in "ABCD"))
    assert chi_square < 16.3, "3 degrees of freedom, p = 0.001"


def test_round_robin_takes_turns_and_skips_the_unfit() -> None:
    fleet = [worker("C"), worker("A"), worker("B", ready=False)]
    turns = [choices("round-robin", fleet, sequence=i) for i in range(6)]
    assert turns == [{"A"}, {"C"}, {"C"}, {"A"}, {"C"}, {"C"}]


def test_consistent_hash_keeps_an_affinity_where_it_is() -> None:
    fleet = [worker(name) for name in "ABCDEFGH"]
    homes = {i: choices("consistent-hash", fleet, affinity=b"%d" % i) for i in range(200)}
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(*homes.values())) == 8
    less = [c for c in fleet if c.worker.pod != "C"]
    moved = [i for i, home in homes.items() if choices("consistent-hash", less, affinity=b"%d" % i) != home]
    assert {min(homes[i]) for i in moved} == {"C"}, "only those of the worker that left move"


def test_consistent_hash_is_bounded() -> None:
    fleet = [worker(name) for name in "ABCD"]
    home = min(choices("consistent-hash", fleet))
    loaded = [worker(name, inflight_requests=10 if name == home else 4) for name in "ABCD"]
    assert home not in choices("consistent-hash", loaded)
    assert choices("consistent-hash", loaded, affinity=b"") <= set("ABCD") - {home}, "no affinity: least loaded"
