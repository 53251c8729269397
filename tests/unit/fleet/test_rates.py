"""Rates learnt from first tokens: true ones are found, stalls do not hurt, a new worker is taken for a typical one."""

from random import Random

import pytest

from router.core.types import WorkerAddress
from router.fleet.bookings import Bookings
from router.fleet.rates import BOUND_RATIO, PrefillRates

PRIOR = 20_000.0


def teach(rates: PrefillRates, worker: str, rate: float, rng: Random, pairs: int = 60, stalls: float = 0.0) -> None:
    for _ in range(pairs):
        ahead = rng.randint(1500, 9000)
        seconds = 0.05 + ahead / rate + (rng.uniform(5, 30) if rng.random() < stalls else 0.0)
        rates.observe(worker, ahead, seconds)


@pytest.mark.parametrize("truth", [1500.0, 20_000.0, 60_000.0])
@pytest.mark.parametrize("stalls", [0.0, 0.5])
def test_a_rate_is_found_though_half_of_the_requests_stall(truth: float, stalls: float) -> None:
    rates = PrefillRates(PRIOR)
    for worker in "abc":
        teach(rates, worker, truth, Random(worker), stalls=stalls)
    for worker in "abc":
        assert 0.5 * truth < rates.tokens_per_s(worker) <= truth


def test_a_slow_worker_among_fast_ones_shows() -> None:
    rates = PrefillRates(PRIOR)
    for worker, truth in (("a", 20_000.0), ("b", 20_000.0), ("c", 20_000.0), ("slow", 10_000.0)):
        teach(rates, worker, truth, Random(worker))
    assert rates.tokens_per_s("slow") == pytest.approx(0.55 * rates.tokens_per_s("a"), rel=0.15)
    assert rates.tokens_per_s("new") == pytest.approx(rates.tokens_per_s("a"), rel=0.15), "typical, not configured"
    rates.retire("slow")
    assert rates.tokens_per_s("slow") == rates.tokens_per_s("new")


def test_short_prompts_and_absurd_times_teach_nothing_wild() -> None:
    rates = PrefillRates(PRIOR)
    for _ in range(100):
        rates.observe("a", 40, 0.2)
        rates.observe("a", 5000, 0.0)
    assert rates.tokens_per_s("a") == PRIOR
    for _ in range(100):
        rates.observe("a", 5000, 1e9)
        rates.observe("b", 10**12, 1e-6)
    assert rates.tokens_per_s("a") >= PRIOR / BOUND_RATIO
    assert rates.tokens_per_s("b") <= PRIOR * BOUND_RATIO


def test_bookings_teach_what_was_ahead_of_a_first_token() -> None:
    now_s = 100.0
    worker = WorkerAddress("pod")
    bookings = Bookings(rates=PrefillRates(PRIOR), clock=lambda: now_s)
    assert bookings.rates is not None
    for _ in range(40):
        first = bookings.hold(worker, prefill_tokens=4000, prompt_tokens=4000, exact=True)
        second = bookings.hold(worker, prefill_tokens=4000, prompt_tokens=4000, exact=True)
        guessed = bookings.hold(worker, prefill_tokens=4000, prompt_tokens=4000)
        now_s += 1.0
        first.first_token()
        now_s += 1.0
        second.first_token()
        guessed.first_token()
        for booking in (first, second, guessed):
            booking.release()
    assert bookings.rates.tokens_per_s(worker) == pytest.approx(4000.0, rel=0.4), "8,000 tokens ahead in 2 s"


def test_neither_whole_answers_nor_past_lives_teach() -> None:
    worker = WorkerAddress("pod")
    bookings = Bookings(rates=PrefillRates(PRIOR), clock=iter(range(0, 10_000, 5)).__next__)
    assert bookings.rates is not None
    for _ in range(20):
        bookings.hold(worker, prefill_tokens=4000, exact=True).first_token(streamed=False)
        old = bookings.hold(worker, prefill_tokens=4000, exact=True)
        bookings.retire(worker)
        bookings.of(worker)
        old.first_token()
    assert bookings.rates.tokens_per_s(worker) == PRIOR
