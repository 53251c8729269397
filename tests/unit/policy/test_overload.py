"""Waiting in the router: when every worker has enough to do, and whose turn it is."""

from random import Random

import pytest

from router.core.types import WorkerAddress
from router.policy.overload import (
    RETRY_AFTER_MAX_S,
    Line,
    Ticket,
    least_work_s,
    overloaded,
    retry_after_s,
)
from router.policy.pick import Candidate, RoutingRequest, prefill_tokens

REQUEST = RoutingRequest(prompt_tokens=5000)


def worker(name: str = "a", booked: int = 0, *, held: int = 0, rate: float = 10_000.0, **more: object) -> Candidate:
    return Candidate(
        worker=WorkerAddress(name),
        matched_tokens=held,
        booked_prefill_tokens=booked,
        prefill_tokens_per_s=rate,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("candidates", "full"),
    [
        pytest.param([worker("a", 4000)], True, id="the only one has more booked"),
        pytest.param([worker("a", 3000)], False, id="just the limit is room"),
        pytest.param([worker("a", 9000), worker("b", 2000)], False, id="one with room is enough"),
        pytest.param([worker("a", 9000), worker("b", 2000, rate=5000.0)], True, id="seconds count, not tokens"),
        pytest.param([worker("a", 9000), worker("b", 0, ready=False)], True, id="one that is not ready is no room"),
        pytest.param([worker("a", 9000), worker("b", max_model_len_tokens=4096)], True, id="nor one too small for it"),
        pytest.param([worker("b", 9000, ready=False)], False, id="nobody ready: that is no overload"),
        pytest.param([], False, id="nor is nobody at all"),
    ],
)
def test_overloaded_is_when_every_worker_that_fits_is(candidates: list[Candidate], full: bool) -> None:
    assert overloaded(candidates, REQUEST, 0.3) is full


def test_a_ticket_stands_in_line_until_it_is_served_and_is_like_no_other() -> None:
    line, first, second = Line(), Ticket(work_s=1.0, since_s=0.0), Ticket(work_s=1.0, since_s=0.0)
    line.enter(first)
    assert (first in line, second in line) == (True, False)
    line.serve(first)
    assert first not in line


def test_work_is_counted_where_most_is_held() -> None:
    assert least_work_s([worker("a"), worker("b", 90_000, held=4000)], REQUEST) == pytest.approx(
        prefill_tokens(5000, 1000) / 10_000
    )
    assert least_work_s([worker("a", ready=False)], REQUEST) == 0.0


@pytest.mark.parametrize(
    ("candidates", "waiting_work_s", "said"),
    [
        pytest.param([worker("a", 4000)], 0.0, 1, id="soon: never less than a whole second"),
        pytest.param([worker("a", 53_000), worker("b", 90_000)], 0.0, 5, id="when the least booked has room"),
        pytest.param([worker("a", 53_000), worker("b", 90_000)], 6.0, 8, id="and those before are done, by all"),
        pytest.param([worker("a", 10_000_000)], 0.0, RETRY_AFTER_MAX_S, id="bounded"),
        pytest.param([worker("a", 99_000, ready=False)], 9.0, 1, id="nobody ready: nothing to estimate from"),
    ],
)
def test_retry_after_is_when_there_may_be_room(candidates: list[Candidate], waiting_work_s: float, said: int) -> None:
    assert retry_after_s(candidates, 0.3, waiting_work_s, least_s=1) == said


def ticket(
    work_s: float = 1.0, since_s: float = 0.0, *, priority: int = 0, tenant: str = "", lane: str = "m"
) -> Ticket:
    return Ticket(work_s=work_s, since_s=since_s, priority=priority, tenant=tenant, lane=lane)


def served(line: Line) -> list[Ticket]:
    """All of them in the order of their turns."""
    order = []
    while (first := line.first()) is not None:
        line.serve(first)
        order.append(first)
    return order


@pytest.mark.parametrize(
    "in_order",
    [
        pytest.param([ticket(0.5), ticket(1.0), ticket(2.0)], id="least work first"),
        pytest.param(
            [ticket(2.0, since_s=0), ticket(1.0, since_s=11)], id="eleven seconds earlier outweigh one of work"
        ),
        pytest.param([ticket(1.0, since_s=9), ticket(2.0, since_s=0)], id="nine do not"),
        pytest.param([ticket(1.0), ticket(1.0), ticket(1.0)], id="alike: as they came"),
        pytest.param([ticket(9.0, priority=-1), ticket(0.1), ticket(0.01, priority=5)], id="priority before work"),
        pytest.param(
            [ticket(1.0, tenant="a"), ticket(3.0, tenant="b"), ticket(2.0, tenant="a"), ticket(2.5, tenant="a")],
            id="the tenant that got less before work",
        ),
        pytest.param(
            [ticket(1.0, tenant="a", priority=-1), ticket(2.0, tenant="a", priority=-1), ticket(0.1, tenant="b")],
            id="priority before tenants",
        ),
        pytest.param([ticket(1.0, lane="m"), ticket(2.0, lane="n"), ticket(3.0, lane="m")], id="lanes share one order"),
    ],
)
def test_whose_turn_it_is(in_order: list[Ticket]) -> None:
    line = Line()
    ties = len({t.rank_s for t in in_order}) < len(in_order)
    for t in in_order if ties else reversed(in_order):
        line.enter(t)
    assert served(line) == in_order


def test_a_blocked_lane_keeps_nobody_else() -> None:
    line = Line()
    mine, other = ticket(1.0, lane="m"), ticket(2.0, lane="n")
    line.enter(mine)
    line.enter(other)
    assert line.first({"m"}) is other
    assert line.first({"m", "n"}) is None


def test_a_tenant_that_comes_anew_gets_no_more_than_its_share() -> None:
    """What it did not use it cannot claim later: from when it comes the two take turns."""
    line = Line()
    for _ in range(20):
        line.enter(ticket(tenant="old"))
    for _ in range(10):
        line.serve(line.first() or pytest.fail("they wait"))
    for _ in range(5):
        line.enter(ticket(tenant="new"))
    turns = [t.tenant for t in served(line)]
    assert abs(turns[:10].index("new")) <= 1
    assert turns[:10].count("new") == 5


def test_a_noisy_tenant_delays_a_quiet_one_by_one_request() -> None:
    line = Line()
    for _ in range(500):
        line.enter(ticket(0.1, tenant="noisy"))
    for at in range(20):
        for _ in range(3):
            line.serve(line.first() or pytest.fail("they wait"))
        quiet = ticket(1.0, since_s=at, tenant="quiet")
        line.enter(quiet)
        before = 0
        while (first := line.first()) is not quiet:
            assert first is not None
            line.serve(first)
            before += 1
        line.serve(quiet)
        assert before <= (1 if at == 0 else 11), "one, or as much as the quiet one got last time"


def test_nothing_is_held_against_anybody_once_nobody_waits() -> None:
    line = Line()
    line.enter(ticket(100.0, tenant="a"))
    served(line)
    line.enter(ticket(5.0, tenant="b"))
    line.enter(ticket(1.0, tenant="a"))
    assert [t.tenant for t in served(line)] == ["a", "b"]


@pytest.mark.parametrize(
    ("waiting", "given_up"),
    [
        pytest.param([ticket(1.0), ticket(3.0), ticket(2.0)], 1, id="most work"),
        pytest.param([ticket(9.0), ticket(1.0, priority=1)], 1, id="the last priority"),
        pytest.param(
            [ticket(9.0, tenant="b"), ticket(1.0, tenant="a"), ticket(2.0, tenant="a")],
            2,
            id="of the crowd of one tenant",
        ),
        pytest.param([ticket(9.0, since_s=0), ticket(8.5, since_s=10)], 1, id="who waits long has an earlier place"),
    ],
)
def test_who_gives_way_when_too_many_wait(waiting: list[Ticket], given_up: int) -> None:
    line = Line()
    for t in waiting:
        line.enter(t)
    assert line.last() is waiting[given_up]


@pytest.mark.parametrize("seed", range(20))
def test_books_balance_whatever_comes_and_goes(seed: int) -> None:
    """Against a list searched from end to end; empty at the end, and no tenant is remembered then."""
    rng = Random(seed)
    line, waiting = Line(), list[Ticket]()
    for now in range(600):
        if rng.random() < 0.55:
            t = ticket(
                rng.random(), now, priority=rng.randrange(-1, 2), tenant=str(rng.randrange(400)), lane=rng.choice("mn")
            )
            line.enter(t)
            waiting.append(t)
        elif waiting:
            t = rng.choice(waiting) if rng.random() < 0.3 else (line.first() or pytest.fail("they wait"))
            line.serve(t) if t is line.first() else line.leave(t)
            waiting.remove(t)
        assert len(line) == len(waiting)
        assert line.work_s == pytest.approx(sum(t.work_s for t in waiting))
        assert sum(line.by_priority().values()) == len(waiting)
        assert line.tenants == len({t.tenant for t in waiting})
        first = line.first()
        assert (first is None) == (not waiting)
        if first is not None:
            key = (first.priority, line._served_s[first.tenant], first.rank_s)
            assert key == min((t.priority, line._served_s[t.tenant], t.rank_s) for t in waiting)
    for t in waiting:
        line.leave(t)
    assert (len(line), line.work_s, line.first(), line._served_s, line._groups) == (0, 0.0, None, {}, {})


def test_former_tenants_are_forgotten() -> None:
    """A thousand keys that each come once leave no thousand counters behind."""
    line = Line()
    line.enter(ticket(9e9, tenant="stays", priority=9))
    for i in range(5000):
        line.enter(ticket(tenant=f"once-{i}"))
        line.serve(line.first() or pytest.fail("one waits"))
    assert len(line._served_s) < 1200
