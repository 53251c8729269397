"""How far a prefix spreads: as far as its load needs, and back again. Emulated pods, virtual time."""

import random
from collections import Counter

import msgspec
import pytest

from loadtest import sim_scenario, workload
from loadtest.profile import load_profile
from loadtest.sim_policies import FACTORIES
from loadtest.sim_report import row
from loadtest.sim_world import Sample, Setup, Simulation
from loadtest.workload import Segment, Session, Stage, Turn, Workload, block_hashes
from router.policy.pick import Costs

PREFIX = Segment(77, 6000)
BLOCK = 64
PODS = 8


def single(rng: random.Random, at_s: float, prompt: tuple[Segment, ...], group: str) -> Session:
    return Session(at_s, (Turn(prompt, 150, Segment(rng.getrandbits(60), 150), group=group),))


def rising_and_falling(rates: tuple[float, ...], seconds: float, *, unlike_per_s: float = 0.0) -> Workload:
    """One prefix whose rate changes every `seconds`; besides, prompts of 6,000 tokens that share nothing."""
    rng = random.Random(1)
    sessions = [
        single(rng, i * seconds + t, (PREFIX, Segment(rng.getrandbits(60), 200)), "hot")
        for i, rate in enumerate(rates)
        for t in workload.poisson(rng, rate, seconds)
    ]
    total_s = len(rates) * seconds
    if unlike_per_s:
        sessions += [
            single(rng, t, (Segment(rng.getrandbits(60), 6000),), "unlike")
            for t in workload.poisson(rng, unlike_per_s, total_s)
        ]
    sessions.sort(key=lambda s: s.start_s)
    return Workload("hot", (Stage("hot", tuple(sessions), seconds=total_s),))


def used_pods(samples: list[Sample], begin_s: float, end_s: float) -> int:
    """Pods that got more than a twentieth of the hot requests of a time."""
    counts = Counter(s.pod for s in samples if s.group == "hot" and begin_s <= s.sent_s < end_s)
    return sum(n > 0.05 * counts.total() for n in counts.values())


def hot_run(rule: str = "prefix", costs: Costs | None = None) -> list[int]:
    """Pods used while the rate is 5, 60 and 5 requests/s, the first half of each time left out."""
    setup = Setup(profile=load_profile("qwen3-32b-2xh100"), pods=PODS)
    load = rising_and_falling((5.0, 60.0, 5.0), 20.0)
    samples = Simulation(setup, load, FACTORIES[rule](), 1, costs=costs).run().stages[0].samples
    return [used_pods(samples, begin, begin + 10.0) for begin in (10.0, 30.0, 50.0)]


def test_the_replicas_of_a_hot_prefix_follow_its_load_up_and_down() -> None:
    before, during, after = hot_run()
    assert before <= 2
    assert during == PODS
    assert after <= PODS / 2


@pytest.mark.parametrize(
    ("rule", "costs"),
    [
        pytest.param("prefix", Costs(home_miss_ratio=-1.0), id="without homes the copies stay in use"),
        pytest.param("least-loaded", None, id="load alone is everywhere from the start"),
        pytest.param("longest-match", None, id="the match alone never spreads"),
    ],
)
def test_other_rules_do_not_follow_it(rule: str, costs: Costs | None) -> None:
    before, during, after = hot_run(rule, costs)
    assert not (before <= 2 and during == PODS and after <= PODS / 2)


@pytest.mark.parametrize(("home_miss_ratio", "made_room"), [(Costs().home_miss_ratio, True), (-1.0, False)])
def test_copies_that_the_load_does_not_need_make_room(home_miss_ratio: float, made_room: bool) -> None:
    """In small caches under prompts that share nothing, what is not used is evicted."""
    profile = msgspec.structs.replace(load_profile("qwen3-32b-2xh100"), num_blocks=1000)
    load = rising_and_falling((5.0, 60.0, 5.0, 5.0, 5.0, 5.0, 5.0), 15.0, unlike_per_s=2.0)
    costs = Costs(home_miss_ratio=home_miss_ratio)
    simulation = Simulation(Setup(profile=profile, pods=PODS), load, FACTORIES["prefix"](), 1, costs=costs)
    copies: dict[str, int] = {}

    def look(when: str) -> None:
        chain = block_hashes((PREFIX,), BLOCK)
        copies[when] = sum(p.engine.match_blocks(chain) == len(chain) for p in simulation._pods)

    simulation._at(29.0, look, "high")
    simulation._at(104.0, look, "low")
    simulation.run()
    assert copies["high"] == PODS
    assert (copies["low"] <= 5) == made_room, copies


def test_32_siblings_at_once_wait_no_longer_than_under_the_best_rule() -> None:
    regime = sim_scenario.load_regime("bursts-32")
    profile = sim_scenario.profile_of(regime)
    p90_s = {}
    for rule in ("prefix", "sticky-until-saturated", "lmetric", "greedy-ttft", "precise-3-2-2", "longest-match"):
        (stage,) = sim_scenario.build(regime, profile, 1).stages
        load = Workload("bursts", (msgspec.structs.replace(stage, sessions=stage.sessions[: 8 * 32]),))
        outcome = Simulation(sim_scenario.setup(regime, profile), load, FACTORIES[rule](), 1).run()
        p90_s[rule] = row(rule, outcome.stages, regime.pods).ttft_p90_s
    assert p90_s["prefix"] <= 1.1 * min(p90_s.values()), p90_s
    assert p90_s["prefix"] < 0.7 * max(p90_s.values()), "the bursts tell rules apart"
