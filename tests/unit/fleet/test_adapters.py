"""Adapters on a worker as a specification: what a request costs there beyond one whose adapter is loaded."""

from collections.abc import Callable

import pytest

from router.core.types import WorkerAddress
from router.fleet.adapters import EVICTING_LOADS, TENURE_PRIOR_S, UNKNOWN_MAX, Adapters

W = WorkerAddress("p")
LOAD_S = 0.5


class Pod:
    """One worker with so many slots, as far as the router has been told."""

    def __init__(self, max_loras: int | None = 2) -> None:
        self.now_s = 0.0
        self.adapters = Adapters(load_s=LOAD_S, clock=lambda: self.now_s)
        self.max_loras = max_loras
        if max_loras is not None:
            self.scrape()

    def scrape(self, running: str = "", waiting: str = "", own: str = "") -> None:
        assert self.max_loras is not None
        self.adapters.scraped(
            W, max_loras=self.max_loras, running=[*running], waiting=[*waiting], own=[*own], valid_s=10.0
        )

    def send(self, names: str) -> list[Callable[[], None]]:
        return [self.adapters.hold(W, name) for name in names]

    def delays(self, names: str) -> list[float]:
        return [self.adapters.delay_s(W, name) for name in names]


TURN_S = TENURE_PRIOR_S / 2
EVICT_S = EVICTING_LOADS * LOAD_S


@pytest.mark.parametrize(
    ("sent", "ended", "costs"),
    [
        pytest.param("", "", {"a": LOAD_S}, id="a free slot: it is loaded"),
        pytest.param("a", "", {"a": 0.0, "b": LOAD_S}, id="in use: nothing"),
        pytest.param("a", "a", {"a": 0.0, "b": LOAD_S}, id="idle and still there: nothing"),
        pytest.param("ab", "a", {"a": 0.0, "b": 0.0, "c": EVICT_S}, id="an idle one makes room: loaded twice"),
        pytest.param("abc", "abc", {"a": EVICT_S, "b": 0.0, "c": 0.0}, id="the least recently used had to go"),
        pytest.param("aba", "ab", {"a": 0.0, "c": EVICT_S}, id="of two requests one has ended: still in use"),
        pytest.param("ab", "", {"a": 0.0, "b": 0.0, "c": TURN_S + EVICT_S}, id="all slots in use: one turn"),
        pytest.param("abc", "", {"c": TURN_S + EVICT_S, "d": 2 * TURN_S + EVICT_S}, id="others wait already"),
    ],
)
def test_what_an_adapter_costs(sent: str, ended: str, costs: dict[str, float]) -> None:
    pod = Pod(max_loras=2)
    releases = dict(zip(sent, pod.send(sent), strict=False))
    for name in ended:
        releases[name]()
    assert dict(zip(costs, pod.delays("".join(costs)), strict=True)) == costs


def test_of_a_pod_that_has_not_said_how_many_slots_it_has_nothing_is_claimed() -> None:
    pod = Pod(max_loras=None)
    names = [chr(97 + i) for i in range(UNKNOWN_MAX + 5)]
    for release in pod.send("".join(names)):
        release()
    assert pod.delays("az") == [0.0, 0.0]
    assert pod.adapters.status(W) is None
    assert len(pod.adapters._slots[W].recent) == UNKNOWN_MAX, "bounded all the same"
    assert Adapters().delay_s(W, "a") == 0.0


def test_what_others_use_is_seen_until_the_scrape_is_stale() -> None:
    pod = Pod(max_loras=1)
    pod.scrape(running="x")
    assert pod.delays("xa") == [0.0, TENURE_PRIOR_S + EVICT_S]
    pod.now_s = 11.0
    assert pod.delays("xa") == [0.0, EVICT_S], "in use no longer, as far as is known, but the last that was there"


def test_ones_own_requests_are_not_taken_for_others() -> None:
    pod = Pod(max_loras=1)
    (release,) = pod.send("a")
    pod.scrape(running="a")
    pod.scrape(running="a", own="a")
    release()
    assert pod.delays("b") == [EVICT_S]
    pod.scrape(running="a", own="a")
    assert pod.delays("b") == [EVICT_S], "it had ended by the time the answer was read"


def test_how_long_slots_are_kept_is_learnt() -> None:
    pod = Pod(max_loras=1)
    for _ in range(200):
        (release,) = pod.send("a")
        pod.now_s += 1.0
        release()
    pod.send("a")
    assert pod.delays("b") == pytest.approx([1.0 + EVICT_S], rel=0.01)


def test_a_new_life_has_nothing_loaded_and_the_old_ones_requests_do_it_no_harm() -> None:
    pod = Pod(max_loras=1)
    (release,) = pod.send("a")
    pod.adapters.retire(W)
    assert pod.delays("a") == [0.0], "nothing is known of it"
    pod.scrape()
    release()
    assert pod.delays("a") == [LOAD_S]
    assert pod.adapters.status(W) == {"max_loras": 1, "in_flight": [], "loaded": []}
