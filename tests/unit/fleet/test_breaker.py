"""Is a worker worth another request? Time is handed in."""

from __future__ import annotations

import pytest

from router.fleet.breaker import LONGEST_PAUSE_S, TRIAL_LIMIT_S, Breaker
from router.policy.retry import FailureKind


def opened(at_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(3):
        breaker.failed("reset", now_s=at_s)
    assert breaker.state(now_s=at_s) == "open"
    return breaker


@pytest.mark.parametrize(
    ("kinds", "state"),
    [
        pytest.param(["connect"], "open", id="a refused connection at once"),
        pytest.param(["reset", "malformed"], "closed", id="two faults"),
        pytest.param(["reset", "malformed", "timeout"], "open", id="three of any kind"),
        pytest.param(["status_5xx"] * 4, "closed", id="one client's poison"),
        pytest.param(["status_5xx"] * 5, "open", id="five 5xx in a row"),
        pytest.param(["backpressure"] * 50, "closed", id="busy is not ill"),
        pytest.param(["ambiguous"] * 50, "closed", id="idle connections close"),
    ],
)
def test_what_opens_it(kinds: list[FailureKind], state: str) -> None:
    breaker = Breaker()
    for kind in kinds:
        breaker.failed(kind, now_s=0.0)
    assert breaker.state(now_s=0.0) == state
    assert breaker.allows(now_s=0.0) is (state == "closed")


def test_a_success_between_faults_closes_the_count() -> None:
    breaker = Breaker()
    for _ in range(10):
        breaker.failed("reset", now_s=0.0)
        breaker.failed("reset", now_s=0.0)
        breaker.succeeded(now_s=0.0)
    assert breaker.allows(now_s=0.0)


def test_one_trial_at_a_time_and_its_success_closes() -> None:
    breaker = opened()
    assert not breaker.allows(now_s=0.9)
    assert breaker.allows(now_s=1.0)
    breaker.sent(now_s=1.0)
    assert not breaker.allows(now_s=1.1)
    breaker.succeeded(now_s=1.2)
    assert breaker.state(now_s=1.2) == "closed"


def test_a_failed_trial_doubles_the_pause_up_to_a_bound() -> None:
    breaker, now_s, pauses = opened(), 0.0, []
    for _ in range(8):
        began_s = now_s
        while not breaker.allows(now_s=now_s):
            now_s += 0.25
        pauses.append(now_s - began_s)
        breaker.sent(now_s=now_s)
        breaker.failed("reset", now_s=now_s)
    assert pauses == [1, 2, 4, 8, 16, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_a_trial_that_says_nothing_blocks_for_a_while_only() -> None:
    breaker = opened()
    breaker.sent(now_s=1.0)
    assert not breaker.allows(now_s=1.0 + TRIAL_LIMIT_S - 0.1)
    assert breaker.allows(now_s=1.0 + TRIAL_LIMIT_S)


def test_late_answers_do_not_count_as_the_trials() -> None:
    breaker = opened()
    breaker.succeeded(now_s=0.5)  # sent before it opened
    assert not breaker.allows(now_s=0.5)


def test_a_busy_answer_to_the_trial_closes_it() -> None:
    breaker = opened()
    breaker.sent(now_s=1.0)
    breaker.failed("backpressure", now_s=1.1)
    assert breaker.allows(now_s=1.1)
