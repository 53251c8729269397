"""Bookings: exact whatever happens, and never below zero."""

from random import Random

import pytest

from router.core.types import BlockKey, WorkerAddress
from router.fleet.bookings import Booking, Bookings

A, B = WorkerAddress("a"), WorkerAddress("b")
KEY = BlockKey(b"12345678")


def test_a_booking_is_prefill_until_its_first_token_and_gone_at_its_end() -> None:
    bookings = Bookings()
    seen = []
    with bookings.hold(A, prefill_tokens=70, prompt_tokens=100, on_first_token=lambda: seen.append(1)) as booking:
        assert (bookings.of(A).prefill_tokens, bookings.of(A).inflight_requests) == (70, 1)
        booking.first_token()
        booking.first_token()
        assert (bookings.of(A).prefill_tokens, bookings.of(A).decode_context_tokens) == (0, 100)
    assert (bookings.of(A).inflight_requests, bookings.of(A).decode_context_tokens, seen) == (0, 0, [1])


def test_an_error_gives_it_back_too() -> None:
    """H20."""
    bookings = Bookings()
    with pytest.raises(RuntimeError), bookings.hold(A, prefill_tokens=5, crowd_key=KEY):
        raise RuntimeError
    assert (bookings.of(A).prefill_tokens, bookings.inflight_requests, bookings.crowd(KEY)) == (0, 0, 0)


def test_a_release_after_the_pod_flapped_lands_on_the_old_counts() -> None:
    """H21: remove and add the pod while a request runs; its end must not make the new count -1."""
    bookings = Bookings()
    old = bookings.hold(A, prefill_tokens=5)
    bookings.retire(A)
    new = bookings.hold(A, prefill_tokens=7)
    old.release()
    assert (bookings.of(A).prefill_tokens, bookings.of(A).inflight_requests) == (7, 1)
    new.release()
    assert (bookings.of(A).prefill_tokens, bookings.of(A).inflight_requests) == (0, 0)


@pytest.mark.parametrize("seed", range(50))
def test_any_order_of_endings_comes_back_to_zero(seed: int) -> None:
    rng = Random(seed)
    bookings = Bookings()
    eased: list[int] = []
    bookings.eased = lambda: eased.append(bookings.of(A).prefill_tokens + bookings.of(B).prefill_tokens)
    open_ones: list[Booking] = []
    for _ in range(300):
        if rng.random() < 0.5 or not open_ones:
            open_ones.append(
                bookings.hold(rng.choice([A, B]), prefill_tokens=rng.randrange(100), prompt_tokens=9, crowd_key=KEY)
            )
        else:
            booking = rng.choice(open_ones)
            rng.choice([booking.first_token, booking.assume_prefilled, booking.release, booking.release])()
        if rng.random() < 0.02:
            bookings.retire(A)
        assert all(bookings.of(w).inflight_requests >= 0 and bookings.of(w).prefill_tokens >= 0 for w in (A, B))
    for booking in open_ones:
        booking.release()
    assert eased
    assert bookings.inflight_requests == bookings.crowd(KEY) == 0
    assert all(bookings.of(w).prefill_tokens == bookings.of(w).decode_context_tokens == 0 for w in (A, B))


def test_who_waits_for_room_hears_when_there_may_be_some() -> None:
    bookings = Bookings()
    left: list[int] = []
    bookings.eased = lambda: left.append(bookings.of(A).prefill_tokens)
    first, second, third = (bookings.hold(A, prefill_tokens=n) for n in (70, 20, 3))
    assert left == []
    first.first_token()
    second.assume_prefilled()
    third.release()
    assert left == [23, 3, 0]


def test_a_prompt_taken_for_computed_weighs_nothing_and_its_first_token_still_counts() -> None:
    bookings = Bookings()
    seen = []
    with bookings.hold(A, prefill_tokens=70, prompt_tokens=100, on_first_token=lambda: seen.append(1)) as booking:
        booking.assume_prefilled()
        booking.assume_prefilled()
        assert (bookings.of(A).prefill_tokens, bookings.of(A).inflight_requests) == (0, 1)
        booking.first_token()
        booking.assume_prefilled()
        assert (bookings.of(A).prefill_tokens, bookings.of(A).decode_context_tokens, seen) == (0, 100, [1])
    assert (bookings.of(A).prefill_tokens, bookings.of(A).decode_context_tokens) == (0, 0)


def test_prompts_placed_on_a_worker_are_counted_for_ten_minutes() -> None:
    now_s = 0.0
    bookings = Bookings(clock=lambda: now_s)
    worker = WorkerAddress("placed")
    for _ in range(5):
        bookings.place(worker, 1000)
        now_s += 200.0
    assert bookings.placed_tokens(worker) == 3000, "those of 400, 600 and 800 s"
    assert bookings.placed_tokens(WorkerAddress("other")) == 0
    for _ in range(1000):
        now_s += 0.01
        bookings.place(worker, 1)
    assert len(bookings.of(worker).placed) <= 15, "one entry a second, however many requests"
    assert bookings.placed_tokens(worker) == 3000, "that of 400 s has gone meanwhile"
    bookings.retire(worker)
    assert bookings.placed_tokens(worker) == 0, "a new life has an empty cache"
