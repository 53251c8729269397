"""Many at once, before anything is answered or told: how a burst is shared out by one conductor and by two routers."""

import random
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from router.peers import HEARD_TTL_S, Peers
from router.policy.baselines import POLICIES
from router.policy.pick import Candidate, Chosen, Costs, Decision, RoutingRequest
from router.route import Choice, RouteLimits, RouteRequest
from tests.unit.test_route import Town

SHARED = list(range(4000))


def unlike(count: int, *, tokens: int = 1600, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(30_000)] * tokens for _ in range(count)]


def siblings(count: int, *, own_tokens: int = 200) -> list[list[int]]:
    """One new prefix of 4,000 tokens, each with an end of its own."""
    return [SHARED + [10_000 + i] * own_tokens for i in range(count)]


async def send(town: Town, bodies: Sequence[list[int]]) -> list[Choice]:
    """All are prepared before the first is chosen, and nothing is answered."""
    prepared = []
    for body in bodies:
        text = msgspec.json.encode(body)
        request = RouteRequest(endpoint="/v1/completions", model="m", body=text, body_bytes=len(text))
        prepared.append(await town.conductor.prepare(request))
    chosen = [town.conductor.choose(p) for p in prepared]
    assert all(isinstance(c, Choice) for c in chosen)
    return [c for c in chosen if isinstance(c, Choice)]


def counted(choices: Sequence[Choice]) -> Counter[str]:
    return Counter(c.name for c in choices)


class Routers:
    """Two of them over the same two pods. They tell each other when they are told to."""

    def __init__(self) -> None:
        self.towns = [Town(pods=2), Town(pods=2)]
        self.peers = [Peers(b"one"), Peers(b"two")]
        for town, peers in zip(self.towns, self.peers, strict=True):
            town.conductor._peers = peers
            town.conductor._clock = lambda: 100.0

    async def share(self, first: Sequence[list[int]], second: Sequence[list[int]], seed: int) -> Counter[str]:
        """Who gets them, a part through each router, nothing told in between."""
        both: Counter[str] = Counter()
        for town, bodies in zip(self.towns, (first, second), strict=True):
            town.conductor._rng.seed(seed)  # alike: chance must not be what keeps them apart
            both += counted(await send(town, bodies))
        return both

    def exchange(self) -> None:
        told = [p.tell(t.fleet.bookings) for p, t in zip(self.peers, self.towns, strict=True)]
        for town, peers, message in zip(self.towns, self.peers, reversed(told), strict=True):
            for heard in peers.hear(message, town.now_s):
                town.local.heard(heard.worker, heard.keys, ttl_s=HEARD_TTL_S)


@pytest.mark.parametrize("pods", [2, 4, 5, 8, 10])
async def test_a_hundred_at_once_on_idle_pods_are_shared_evenly(pods: int) -> None:
    """H58: within 20 % of even, with no scrape to help."""
    counts = counted(await send(Town(pods=pods), unlike(100)))
    even = 100 / pods
    assert all(0.8 * even <= counts[f"pod-{i}"] <= 1.2 * even for i in range(pods)), counts


@pytest.mark.parametrize("seed", range(5))
async def test_two_routers_that_do_not_hear_each_other_in_time_do_not_herd(seed: int) -> None:
    """H67: 200 unlike prompts on two pods, 100 through each router, all between two exchanges."""
    both = await Routers().share(unlike(100), unlike(100, seed=2), seed)
    assert 80 <= both["pod-0"] <= 120, both


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [10, 50, 100])
async def test_a_new_prefix_through_two_routers_at_once_is_no_pods_alone(seed: int, count: int) -> None:
    """Within one exchange interval at most 70 % of it on one pod, although each router sees only its own half."""
    bodies = siblings(2 * count)
    both = await Routers().share(bodies[::2], bodies[1::2], seed)
    assert max(both.values()) <= 0.7 * 2 * count, both


def herd(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: random.Random) -> Decision:
    """The longest match, the first among equals, whatever is under way."""
    c = max(candidates, key=lambda c: c.matched_tokens)
    return Chosen(worker=c.worker, matched_tokens=c.matched_tokens, reason="match")


async def test_two_routers_can_herd() -> None:
    """What is asked of them can be missed."""
    bodies = siblings(100)
    for parts in ((bodies[::2], bodies[1::2]), (unlike(50), unlike(50, seed=2))):
        routers = Routers()
        for town in routers.towns:
            town.conductor._policies = {"prefix": herd}
        assert max((await routers.share(*parts, seed=1)).values()) > 70


async def test_after_an_exchange_the_new_prefix_is_known_to_both() -> None:
    routers = Routers()
    one, two = routers.towns
    (first,) = await send(one, siblings(1))
    routers.exchange()
    (second,) = await send(two, siblings(2)[1:])
    assert (second.worker, second.matched_tokens) == (first.worker, len(SHARED))


@pytest.mark.parametrize("pods", [8, 32, 64])
async def test_32_siblings_at_once_share_what_is_computed(pods: int) -> None:
    """A prefix nobody has seen, on an idle fleet: the crowd pays for a copy on each of few pods, not for one each."""
    chosen = await send(Town(pods=pods), siblings(32))
    counts = counted(chosen)
    assert sum(c.matched_tokens == 0 for c in chosen) == len(counts) <= 12, "each of few pods computes the prefix once"
    assert max(counts.values()) <= 8, "and no pod is left with it alone"


async def test_what_is_asked_of_32_siblings_can_be_missed() -> None:
    greedy = Town(pods=8)
    greedy.conductor._policies = {"prefix": POLICIES["longest-match"]}
    assert max(counted(await send(greedy, siblings(32))).values()) > 8
    forgetful = Town(pods=8)
    forgetful.conductor._limits = RouteLimits(local_ttl_s=0.0)
    chosen = await send(forgetful, siblings(32))
    assert sum(c.matched_tokens == 0 for c in chosen) > len(counted(chosen))
