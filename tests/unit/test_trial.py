"""A control group and a shadow on the conductor: who serves, what is counted, and that a shadow changes nothing."""

from collections import Counter

import msgspec

from router.core.types import WorkerAddress
from router.ops import Metrics
from router.policy.trial import Control
from router.proxy.record import Meters, Record
from router.route import Choice, RouteRequest
from tests.unit.test_route import Town

RANDOM_FIFTH = Control("random", 0.2)
PROMPT = list(range(320))


async def test_the_control_group_gets_its_share_and_each_request_stays_in_its_arm() -> None:
    town = Town(pods=3, control=RANDOM_FIFTH)
    arms: Counter[object] = Counter()
    for _ in range(1000):
        request = RouteRequest(endpoint="/v1/completions", model="m", body=b"[1,2,3]")
        prepared = await town.conductor.prepare(request)
        first = town.conductor.choose(prepared)
        assert isinstance(first, Choice)
        again = town.conductor.choose(prepared, exclude={first.worker})
        assert isinstance(again, Choice)
        assert (again.arm, again.policy) == (first.arm, first.policy)
        arms[first.arm, first.policy] += 1
    assert set(arms) == {("control", "random"), ("main", "prefix")}
    assert 150 <= arms["control", "random"] <= 250  # 200 +- 4 sigma


async def test_a_request_that_chose_its_policy_is_in_no_arm() -> None:
    town = Town(control=Control("random", 0.5))
    for _ in range(20):
        choice = await town.ask(PROMPT, policy="least-loaded")
        assert (choice.policy, choice.arm) == ("least-loaded", None)
    assert (await Town().ask(PROMPT)).arm is None


def record(arm: str | None, policy: str, *, status: int = 200, path: str = "/v1/chat/completions") -> Metrics:
    metrics = Metrics()
    kept = Record(method="POST", path=path, client="", request_id="")
    kept.choice = msgspec.structs.replace(CHOICE, arm=arm, policy=policy)
    kept.status = status
    kept.first_byte()
    kept.finish(Meters(metrics))
    return metrics


CHOICE = Choice(
    worker=WorkerAddress("p0"),
    url="",
    name="pod-0",
    data_parallel_rank=None,
    booking=Town().fleet.bookings.hold(WorkerAddress("p0")),
    policy="prefix",
    reason="load",
    prompt_tokens=None,
    matched_tokens=None,
    indexed_tokens=None,
)
SERIES = "warmroute_control_first_byte_seconds_count"


def test_first_bytes_are_told_apart_by_arm_and_errors_are_no_answers() -> None:
    assert record("control", "random").value(SERIES, arm="control", policy="random") == 1
    assert record("main", "prefix").value(SERIES, arm="main", policy="prefix") == 1
    assert record("control", "random", status=503).value(SERIES, arm="control", policy="random") == 0
    assert record("control", "random", path="/v1/embeddings").value(SERIES, arm="control", policy="random") == 0
    assert b"control_first_byte_seconds_count" not in record(None, "prefix").render()


async def test_a_shadow_changes_no_choice() -> None:
    """The same town, the same dice: with a shadow and without, every choice is the same."""
    plain, watched = Town(pods=5), Town(pods=5, shadow="random")
    for i in range(200):
        body = [i % 7] * 64 + PROMPT
        assert (await plain.ask(body)).worker == (await watched.ask(body)).worker
    assert watched.fleet.bookings.inflight_requests == 200


async def test_what_prefix_would_gain_is_seen_before_it_serves() -> None:
    town = Town(pods=4, shadow="prefix")
    town.conductor._policy = "random"
    await town.holds("p1", PROMPT)
    for _ in range(40):
        (await town.ask(PROMPT)).booking.void()
    value = town.metrics.value
    same, other = (value("warmroute_shadow_decisions_total", policy="prefix", agrees=a) for a in ("yes", "no"))
    assert same + other == 40
    assert 2 <= same <= 20  # a quarter by chance
    assert value("warmroute_shadow_prompt_tokens_total") == 40 * 320
    assert value("warmroute_shadow_matched_tokens_total", policy="prefix") == 40 * 304
    assert value("warmroute_shadow_matched_tokens_total", policy="random") == same * 304
    assert value("warmroute_matched_tokens_total", policy="random") == same * 304


async def test_a_shadow_looks_only_at_what_the_routers_own_policy_serves() -> None:
    town = Town(shadow="random")
    await town.ask(PROMPT, policy="least-loaded")
    assert b"shadow_decisions_total{" not in town.metrics.render()


async def test_explaining_shows_the_control_group_the_shadow_and_what_other_routers_have() -> None:
    town = Town(control=RANDOM_FIFTH, shadow="least-loaded")
    await town.holds("p1", PROMPT)
    town.fleet.bookings.hold(WorkerAddress("p1"), prefill_tokens=1)
    body = msgspec.json.encode(PROMPT)
    shown = await town.conductor.explain(RouteRequest(endpoint="/v1/completions", model="m", body=body))
    assert shown["control"] == {"policy": "random", "share_ratio": 0.2}
    assert (shown["chosen_pod"], shown["shadow"]["policy"], shown["shadow"]["chosen_pod"]) == (
        "pod-1", "least-loaded", "pod-0",
    )  # fmt: skip
    nothing = {"prefill_tokens": 0, "inflight_requests": 0, "placed_tokens": 0}
    assert [row["peers"] for row in shown["workers"]] == [nothing, nothing]
    assert b"shadow_decisions_total{" not in town.metrics.render(), "asking is no decision"
