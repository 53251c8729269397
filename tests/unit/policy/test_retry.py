"""May we try again? A table that reads as the rule."""

from __future__ import annotations

import pytest

from router.policy.retry import Again, Attempts, Enough, FailureKind, RetryBudget, RetryRules, Verdict, may_retry


def after(*kinds: FailureKind, rules: RetryRules | None = None, reserve: float = 100) -> Verdict:
    attempts = Attempts()
    for kind in kinds:
        attempts.failed(kind)
    return may_retry(kinds[-1], attempts, RetryBudget(reserve_retries=reserve), rules or RetryRules())


@pytest.mark.parametrize(
    ("kinds", "verdict"),
    [
        pytest.param(["connect"], Again(), id="nothing was sent"),
        pytest.param(["backpressure"], Again(), id="refused before it ran"),
        pytest.param(["shutting_down"], Again(), id="vLLM's 500 while it stops"),
        pytest.param(["reset"], Enough("unsafe"), id="it may have run"),
        pytest.param(["timeout"], Enough("unsafe"), id="it may be running"),
        pytest.param(["malformed"], Enough("unsafe"), id="it ran, whatever it said"),
        pytest.param(["status_5xx"], Enough("unsafe"), id="it may have run before it failed"),
        pytest.param(["ambiguous"], Again(same_worker=True), id="undecidable: once"),
        pytest.param(["ambiguous", "ambiguous"], Enough("ambiguous_again"), id="undecidable: not twice"),
        pytest.param(["ambiguous", "connect"], Again(), id="then provably not"),
        pytest.param(["backpressure"] * 3, Again(), id="three pods refused"),
        pytest.param(["backpressure"] * 4, Enough("attempts"), id="four are enough"),
        pytest.param(["connect"] * 15, Again(), id="many dead pods"),
        pytest.param(["connect"] * 16, Enough("attempts"), id="not any number"),
    ],
)
def test_may_retry(kinds: list[FailureKind], verdict: Verdict) -> None:
    assert after(*kinds) == verdict


def test_ambiguous_retries_can_be_switched_off() -> None:
    assert after("ambiguous", rules=RetryRules(retry_ambiguous=False)) == Enough("ambiguous_off")


def test_the_budget_bounds_what_costs_the_fleet_work_and_nothing_else() -> None:
    assert after("backpressure", reserve=0) == Enough("budget")
    assert after("connect", reserve=0) == Again()


def test_every_new_request_earns_a_part_of_a_retry_up_to_the_reserve() -> None:
    budget = RetryBudget(ratio=0.1, reserve_retries=1)
    assert [budget.spend(), budget.spend()] == [True, False]
    for _ in range(9):
        budget.request()
    assert not budget.spend()
    for _ in range(100):
        budget.request()
    assert [budget.spend(), budget.spend()] == [True, False]
