"""Requests that wait for room: who is let in, when, and that nobody is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from router.core.types import WorkerAddress
from router.fleet.bookings import Bookings
from router.ops import Metrics
from router.policy.overload import WaitRules
from router.policy.pick import Candidate, Refused, RoutingRequest
from router.route import Choice, Prepared, RouteRequest
from router.waiting import Asking, Stopping, Waiting

RATE = 1000.0


class Chooser:
    """Workers of 1,000 tokens a second; a request has as many tokens as its body has bytes. The least booked wins."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = [WorkerAddress(f"w{i}") for i in range(workers)]
        self.bookings = Bookings()
        self.looked_again = 0
        self.chosen: list[tuple[str, Choice]] = []
        self.look: Callable[[], None] = lambda: None

    def weigh(self, prepared: Prepared) -> tuple[Sequence[Candidate], RoutingRequest]:
        candidates = [Candidate(w, 0, self.bookings.of(w).prefill_tokens, 0, 0, 0.0, RATE) for w in self.workers]
        return candidates, RoutingRequest(prompt_tokens=prepared.request.body_bytes)

    def choose(self, prepared: Prepared) -> Choice | Refused:
        if not self.workers:
            return Refused("no_worker")
        worker = min(self.workers, key=lambda w: self.bookings.of(w).prefill_tokens)
        booking = self.bookings.hold(worker, prefill_tokens=prepared.request.body_bytes)
        choice = Choice(
            worker=worker,
            url="",
            name=worker.pod,
            data_parallel_rank=None,
            booking=booking,
            policy="prefix",
            reason="load",
            prompt_tokens=None,
            matched_tokens=None,
            indexed_tokens=None,
        )
        self.chosen.append((prepared.request.endpoint, choice))
        return choice

    async def look_again(self, prepared: Prepared) -> Prepared:
        self.looked_again += 1
        self.look()
        return prepared

    def prefill_due_s(self, worker: WorkerAddress) -> float:
        return self.bookings.of(worker).prefill_tokens / RATE

    def names(self) -> list[str]:
        return [name for name, _ in self.chosen]


class World:
    """A line over some workers, and a clock that is set by hand."""

    def __init__(self, workers: int = 1, **rules: float) -> None:
        self.now_s = 100.0
        self.chooser = Chooser(workers)
        self.metrics = Metrics()
        given = WaitRules(**{"prefill_s": 0.5, "wait_s": 10.0, **rules})  # type: ignore[arg-type]
        self.waiting = Waiting(self.chooser, given, self.metrics, clock=lambda: self.now_s)

    def ask(self, name: str, tokens: int = 600, *, model: str = "m", **asking: object) -> asyncio.Task:
        prepared = Prepared(
            request=RouteRequest(endpoint=name, model=model, body_bytes=tokens), tokens=None, chains={}, sequence=0
        )
        return asyncio.create_task(self.waiting.choose(prepared, Asking(**asking)))  # type: ignore[arg-type]

    async def settle(self) -> None:
        """Until nothing more happens by itself."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def fill(self) -> list[Choice]:
        """Every worker has more than enough."""
        for i in range(len(self.chooser.workers)):
            self.ask(f"first-{i}", 1000)
            await self.settle()
        first = [choice for _, choice in self.chooser.chosen]
        assert len(first) == len(self.chooser.workers), "with room nobody waits"
        self.chooser.chosen.clear()
        return first

    def check_empty(self) -> None:
        """Nothing is left of anybody."""
        assert self.waiting.status()["requests"] == 0
        assert not self.waiting._waiters
        assert not self.waiting._choosing
        assert self.chooser.bookings.inflight_requests == 0


async def test_with_room_nobody_waits() -> None:
    world = World()
    found, waited_s = await world.ask("a")
    assert isinstance(found, Choice)
    assert waited_s is None
    found.booking.release()
    world.check_empty()


async def test_the_choice_is_made_when_there_is_room_and_goes_where_it_is() -> None:
    world = World(workers=2)
    first = await world.fill()
    a = world.ask("a")
    await world.settle()
    assert not a.done()
    assert world.metrics.value("warmroute_waiting_requests") == 1
    world.now_s += 2.0
    first[1].booking.first_token()
    found, waited_s = await a
    assert found.worker == first[1].worker
    assert waited_s == pytest.approx(2.0)
    assert world.chooser.looked_again == 1, "what the index said two seconds ago counts no longer"
    for choice in (*first, found):
        choice.booking.release()
    world.check_empty()
    assert world.metrics.value("warmroute_waited_seconds_count", outcome="admitted") == 1


async def test_only_as_many_are_let_in_as_there_is_room_for() -> None:
    world = World()
    [first] = await world.fill()
    asked = [world.ask(f"{i}", 300) for i in range(6)]
    await world.settle()
    first.booking.release()
    await world.settle()
    assert world.chooser.names() == ["0", "1"], "300 booked are room, 600 are not"
    while not all(t.done() for t in asked):
        world.chooser.chosen[-2][1].booking.release()
        world.chooser.chosen[-1][1].booking.release()
        await world.settle()
    assert world.chooser.names() == ["0", "1", "2", "3", "4", "5"]
    for _, choice in world.chooser.chosen:
        choice.booking.release()
    world.check_empty()


async def test_who_comes_while_others_wait_stands_in_line_too() -> None:
    """A gap that opened a moment ago belongs to those that waited for it."""
    world = World()
    [first] = await world.fill()
    a = world.ask("a", 600)
    await world.settle()
    first.booking.release()  # there is room; whose turn it is shows in the next step of the loop
    b = world.ask("b", 700)
    await world.settle()
    assert (a.done(), b.done()) == (True, False)
    world.chooser.chosen[0][1].booking.release()
    (await b)[0].booking.release()
    world.check_empty()


async def test_priority_overtakes_and_tenants_take_turns() -> None:
    world = World()
    [first] = await world.fill()
    for i in range(4):
        world.ask(f"noisy-{i}", tenant=b"noisy")
    world.ask("quiet", 900, tenant=b"quiet")
    world.ask("urgent", 5000, priority=-1, tenant=b"noisy")
    await world.settle()
    first.booking.release()
    for n in range(6):
        await world.settle()
        assert len(world.chooser.chosen) == n + 1
        world.chooser.chosen[-1][1].booking.release()
    assert world.chooser.names()[:2] == ["urgent", "quiet"]
    world.check_empty()


async def test_a_model_without_room_keeps_no_other_model() -> None:
    world = World()
    [first] = await world.fill()
    narrow, original = world.ask("narrow"), world.chooser.weigh
    await world.settle()

    def weigh(prepared: Prepared) -> tuple[Sequence[Candidate], RoutingRequest]:
        candidates, request = original(prepared)
        return ([Candidate(WorkerAddress("idle"), 0)] if prepared.request.model == "other" else candidates), request

    world.chooser.weigh = weigh  # type: ignore[method-assign]
    other = world.ask("other", model="other")
    await world.settle()
    assert (narrow.done(), other.done()) == (False, True)
    first.booking.release()
    for t in (other, narrow):
        (await t)[0].booking.release()
    world.check_empty()


async def test_a_wait_has_an_end_and_says_when_to_come_again() -> None:
    world = World(wait_s=3.0)
    [first] = await world.fill()
    a = world.ask("a", 2000)
    await world.settle()
    world.now_s += 2.0
    b = world.ask("b", 600)
    await world.settle()
    world.now_s += 1.0
    world.waiting._look()
    await world.settle()
    assert (a.done(), b.done()) == (True, False)
    found, waited_s = await a
    assert found == Refused("overloaded", retry_after_s=2), "0.5 s until there is room and 0.6 s that wait"
    assert waited_s == pytest.approx(3.0)
    assert world.metrics.value("warmroute_turned_away_total", reason="wait_over") == 1
    assert world.metrics.value("warmroute_refusals_total", reason="overloaded") == 1
    first.booking.release()
    (await b)[0].booking.release()
    world.check_empty()


async def test_without_waiting_the_answer_is_no_at_once() -> None:
    world = World(wait_s=0.0)
    [first] = await world.fill()
    found, waited_s = await world.ask("a")
    assert (found, waited_s) == (Refused("overloaded", retry_after_s=1), None)
    assert world.metrics.value("warmroute_turned_away_total", reason="no_wait") == 1
    first.booking.release()
    world.check_empty()


async def test_a_full_line_gives_up_the_crowd_of_one_tenant_not_who_comes_last() -> None:
    world = World(queue_requests=3)
    [first] = await world.fill()
    noisy = [world.ask(f"noisy-{i}", 600 + i, tenant=b"noisy") for i in range(3)]
    await world.settle()
    quiet = world.ask("quiet", 900, tenant=b"quiet")
    await world.settle()
    assert [t.done() for t in (*noisy, quiet)] == [False, False, True, False]
    assert isinstance((await noisy[2])[0], Refused)
    late = world.ask("late", 100, priority=7, tenant=b"third")
    await world.settle()
    assert isinstance((await late)[0], Refused), "the last priority goes first"
    assert world.metrics.value("warmroute_turned_away_total", reason="queue_full") == 2
    first.booking.release()
    for t in (noisy[0], quiet, noisy[1]):
        await world.settle()
        (await t)[0].booking.release()
    world.check_empty()


async def test_who_leaves_frees_its_place_at_once() -> None:
    world = World()
    [first] = await world.fill()
    a, b = world.ask("a"), world.ask("b")
    await world.settle()
    a.cancel()
    await world.settle()
    assert world.waiting.status()["requests"] == 1
    first.booking.release()
    (await b)[0].booking.release()
    assert world.chooser.names() == ["b"]
    world.check_empty()


async def test_who_leaves_at_the_moment_of_its_turn_passes_it_on() -> None:
    world = World()
    [first] = await world.fill()
    a, b = world.ask("a"), world.ask("b")
    await world.settle()
    first.booking.release()
    world.waiting._round()  # a has its turn and does not know it yet
    a.cancel()
    (await b)[0].booking.release()
    assert world.chooser.names() == ["b"]
    assert a.cancelled() or (await asyncio.gather(a, return_exceptions=True))
    world.check_empty()


async def test_who_has_just_left_gets_no_turn() -> None:
    """Cancelled, but it has not run since: its place is still in line when the turn comes."""
    world = World()
    [first] = await world.fill()
    a, b = world.ask("a"), world.ask("b")
    await world.settle()
    a.cancel()
    first.booking.release()
    world.waiting._round()
    (await b)[0].booking.release()
    assert world.chooser.names() == ["b"]
    world.check_empty()


async def test_a_turn_that_fails_is_passed_on() -> None:
    world = World()
    [first] = await world.fill()
    a, b = world.ask("a"), world.ask("b")
    await world.settle()
    world.now_s += 1.0

    def fault() -> None:
        world.chooser.look = lambda: None
        raise RuntimeError("a bug")

    world.chooser.look = fault
    first.booking.release()
    with pytest.raises(RuntimeError):
        await a
    (await b)[0].booking.release()
    world.check_empty()


async def test_when_the_last_worker_goes_those_that_wait_hear_it() -> None:
    world = World()
    [first] = await world.fill()
    a = world.ask("a")
    await world.settle()
    world.chooser.workers.clear()
    world.waiting._look()
    assert (await a)[0] == Refused("no_worker")
    first.booking.release()
    world.check_empty()


async def test_room_that_no_booking_tells_of_is_found_by_looking() -> None:
    world = World()
    [first] = await world.fill()
    a = world.ask("a")
    await world.settle()
    world.chooser.workers.append(WorkerAddress("new"))
    found, _ = await a  # the timer of its own
    assert found.worker == WorkerAddress("new")
    for choice in (first, found):
        choice.booking.release()
    world.check_empty()


async def test_a_reply_in_one_piece_is_taken_for_computed_when_it_should_be() -> None:
    """Nobody will see its first token: booked until its end it would look like work for as long as it decodes."""
    world = World()
    piece, _ = await world.ask("piece", 2000, in_one_piece=True)
    a = world.ask("a")
    await world.settle()
    assert not a.done()
    piece.booking.assume_prefilled()
    found, _ = await a
    piece.booking.assume_prefilled()
    assert world.chooser.bookings.of(found.worker).prefill_tokens == 600, "once only"
    for choice in (piece, found):
        choice.booking.release()
    assert world.chooser.bookings.of(found.worker).prefill_tokens == 0
    world.check_empty()


async def test_the_time_of_a_reply_in_one_piece_is_set() -> None:
    world = World()
    piece, _ = await world.ask("piece", 501, in_one_piece=True)
    stream, _ = await world.ask("stream", 100)
    while world.chooser.bookings.of(piece.worker).prefill_tokens > 100:  # half a second, by the loop's own clock
        await asyncio.sleep(0.01)
    for choice in (piece, stream):
        choice.booking.release()
    world.check_empty()


async def test_shutting_down_ends_every_wait() -> None:
    world = World()
    [first] = await world.fill()
    waits = [world.ask(f"{i}") for i in range(3)]
    await world.settle()
    world.waiting.shut_down()
    late = world.ask("late")
    for t in (*waits, late):
        with pytest.raises(Stopping):
            await t
    first.booking.release()
    world.check_empty()


async def test_what_debug_pods_shows_names_no_tenant() -> None:
    world = World()
    [first] = await world.fill()
    waits = [world.ask("a", tenant=b"sk-secret", priority=2), world.ask("b", tenant=b"other"), world.ask("c")]
    await world.settle()
    world.now_s += 1.5
    shown = world.waiting.status()
    assert {k: shown[k] for k in ("requests", "by_priority", "tenants", "work_s", "oldest_s")} == {
        "requests": 3,
        "by_priority": {"0": 2, "2": 1},
        "tenants": 3,
        "work_s": 1.816,  # 600 tokens each, and what attention adds
        "oldest_s": 1.5,
    }
    assert "secret" not in repr(shown) + repr(list(world.waiting._waiters))
    for t in waits:
        t.cancel()
    await world.settle()
    first.booking.release()
    world.check_empty()
