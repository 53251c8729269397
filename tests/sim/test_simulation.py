"""The simulated fleet: nothing is lost, what is booked is released, predictions come true, odd things happen safely."""

import json
from pathlib import Path

import msgspec
import pytest

from loadtest import simulate, workload
from loadtest.profile import Profile, load_profile
from loadtest.sim_policies import FACTORIES
from loadtest.sim_report import acceptance, row, rows
from loadtest.sim_world import FleetEvent, Outcome, Setup, Simulation
from loadtest.workload import Workload

TRACES = Path(__file__).parents[1] / "data" / "traces"


def profile() -> Profile:
    """The published pod with less memory, so that a short run evicts."""
    return msgspec.structs.replace(load_profile("qwen3-32b-2xh100"), num_blocks=1200)


def load(seed: int = 1, rate: float = 20.0, seconds: float = 12.0) -> Workload:
    return workload.shared_prefix(
        seed, rate=rate, seconds=seconds, groups=30, prefix_tokens=3000, question_tokens=200, output_tokens=40
    )


def simulated(rule: str = "prefix", seed: int = 1, **world: object) -> tuple[Simulation, Outcome]:
    setup = Setup(**{"profile": profile(), "pods": 4, **world})  # type: ignore[arg-type]
    simulation = Simulation(setup, load(seed), FACTORIES[rule](), seed)
    return simulation, simulation.run()


@pytest.mark.parametrize("rule", sorted(FACTORIES))
def test_every_request_is_answered_and_every_booking_released(rule: str) -> None:
    simulation, outcome = simulated(rule)
    samples = outcome.stages[0].samples
    assert len(samples) == len(load().stages[0].sessions)
    for s in samples:
        assert not s.failed
        assert s.sent_s < s.first_s < s.finished_s
        assert 0 <= s.cached_tokens < s.prompt_tokens
    assert sum(v.bookings.inflight_requests for v in simulation._views) == 0
    assert all(not v.bookings.crowds() for v in simulation._views)
    assert all(p.engine.gauges().running == 0 for p in simulation._pods)
    generated = sum(p.engine.gauges().generation_tokens for p in simulation._pods)
    assert generated == sum(s.output_tokens for s in samples)


def test_a_run_repeats_itself() -> None:
    assert simulated()[1].stages[0].samples == simulated()[1].stages[0].samples
    assert simulated()[1].stages[0].samples != simulated(seed=2)[1].stages[0].samples


def test_one_at_a_time_the_prediction_is_the_delivery() -> None:
    """No request overlaps another and events are known at once: what the index says is what the engine finds."""
    quiet = workload.shared_prefix(
        3, rate=0.2, seconds=1500.0, groups=60, prefix_tokens=2000, question_tokens=90, output_tokens=20, zipf=0.9
    )
    setup = Setup(profile=profile(), pods=2, event_lag_s=0.0)
    outcome = Simulation(setup, quiet, FACTORIES["prefix"](), 3).run()
    samples = outcome.stages[0].samples
    assert [s.predicted_tokens for s in samples] == [s.cached_tokens for s in samples]
    assert 0.2 < rows(outcome, 2)[0].hit_ratio < 0.95, "hits and misses both happen"


def test_a_pod_that_dies_fails_its_streams_and_nothing_else() -> None:
    event = FleetEvent(at_s=5.0, action="restart", pod=1, down_s=3.0)
    simulation, outcome = simulated(events=(event,))
    samples = outcome.stages[0].samples
    broken = [s for s in samples if s.failed]
    assert broken
    assert all(s.pod == 1 and s.first_s <= outcome.stages[0].begun_s + 5.0 for s in broken)
    assert all(s.finished_s > 0 for s in samples if not s.failed)
    assert sum(v.bookings.inflight_requests for v in simulation._views) == 0
    while_down = [s for s in samples if 5.0 < s.sent_s < 8.0]
    assert while_down
    assert all(s.pod != 1 for s in while_down)
    assert simulation._pods[1].ready


def test_pods_come_and_go() -> None:
    events = (FleetEvent(at_s=4.0, action="add"), FleetEvent(at_s=6.0, action="remove", pod=0))
    _, outcome = simulated(events=events)
    samples = outcome.stages[0].samples
    assert not any(s.failed for s in samples)
    assert any(s.pod == 4 for s in samples), "a cold pod gets work"
    assert not any(s.pod == 0 for s in samples if s.sent_s > 6.0)


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(ValueError, match="explode"):
        simulated(events=(FleetEvent(at_s=1.0, action="explode"),))


@pytest.mark.parametrize("exchange_interval_s", [None, 0.1])
def test_several_routers(exchange_interval_s: float | None) -> None:
    simulation, outcome = simulated(routers=3, exchange_interval_s=exchange_interval_s)
    assert len(simulation._views) == 3
    assert all(s.finished_s > 0 for s in outcome.stages[0].samples)
    assert sum(v.bookings.inflight_requests for v in simulation._views) == 0


def test_the_exchange_tells_routers_of_each_other() -> None:
    """Without it, two routers see only their own share of a burst and herd more."""
    burst = workload.bursts(
        1, siblings=200, every_s=1, seconds=1, prefix_tokens=64, question_tokens=4000, output_tokens=5
    )
    counts = []
    for exchange in (0.001, None):
        setup = Setup(profile=profile(), pods=2, routers=2, exchange_interval_s=exchange)
        samples = Simulation(setup, burst, FACTORIES["prefix"](), 1).run().stages[0].samples
        counts.append(sum(s.pod == 0 for s in samples))
    assert all(80 <= n <= 120 for n in counts), "200 unlike prompts at once from two routers: 40-60 %"


def test_oracle_and_shortlist_are_ways_to_run() -> None:
    for world in ({"knowledge": "oracle"}, {"shortlist": 2}, {"predict": False}, {"scrape_lag_s": 2.0}):
        _, outcome = simulated(**world)
        assert all(s.finished_s > 0 for s in outcome.stages[0].samples)


def test_a_prompt_longer_than_the_model_is_a_failure_of_that_request_only() -> None:
    long = workload.cold(1, rate=3, seconds=5, prompt_tokens=17_000, output_tokens=10)
    both = workload.mixed("both", [long, load()])
    outcome = Simulation(Setup(profile=profile(), pods=4), both, FACTORIES["prefix"](), 1).run()
    failed = [s for s in outcome.stages[0].samples if s.failed]
    assert len(failed) == len(long.stages[0].sessions)
    assert {s.prompt_tokens for s in failed} == {17_000}


def test_cache_aware_beats_cache_blind_where_prefixes_are_shared() -> None:
    figures = {}
    for rule in ("prefix", "random"):
        _, outcome = simulated(rule)
        figures[rule] = row(rule, outcome.stages, 4)
    assert figures["prefix"].hit_ratio > 1.5 * figures["random"].hit_ratio
    assert figures["prefix"].ttft_p90_s < figures["random"].ttft_p90_s


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    argv = ["--scenario", "bursts-32", "--policy", "prefix", "--policy", "prefix+oracle", "--seeds", "2"]
    assert simulate.main([*argv, "--explain", "1", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "qwen3-32b-2xh100 (calibrated)" in printed
    assert '"queue_s"' in printed, "a decision's terms"
    results = json.loads(out.read_text())
    assert [(r["policy"], r["seed"]) for r in results] == [
        ("prefix", 1), ("prefix", 2), ("prefix+oracle", 1), ("prefix+oracle", 2),
    ]  # fmt: skip
    assert all(r["rows"][0]["failed"] == 0 for r in results)
    assert simulate.main(["--list"]) == 0


@pytest.mark.parametrize(
    "argv", [["--scenario", "none-such"], ["--policy", "none-such"], ["--scenario", "rag", "--traces", "/none-such"]]
)
def test_the_command_refuses_what_it_does_not_know(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(argv) == 2
    assert "none-such" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_published_tables_are_reproduced(seed: int) -> None:
    """The full ladder, both arms. A missed bound means the profile may not call itself calibrated."""
    arms = {}
    for rule in ("precise-3-2-2", "random"):
        setup = Setup(profile=load_profile("qwen3-32b-2xh100"), scrape_interval_s=simulate.PUBLISHED_SCRAPE_S)
        arms[rule] = rows(Simulation(setup, workload.ladder(seed), FACTORIES[rule](), seed).run(), 8)
    missed = [v for v in acceptance(arms["precise-3-2-2"], arms["random"]) if not v.within]
    assert missed == []


@pytest.mark.parametrize("routers", [1, 3])
def test_waiting_in_the_router_loses_nobody_and_leaves_the_pods_little_to_queue(routers: int) -> None:
    """Far over saturation: all wait, all are answered, short prompts first."""
    pods = msgspec.structs.replace(load_profile("qwen3-32b-2xh100"), num_blocks=1200)
    crowd = workload.mixed(
        "crowd",
        [
            workload.cold(1, rate=20.0, seconds=10.0, prompt_tokens=600, output_tokens=20),
            workload.cold(2, rate=6.0, seconds=10.0, prompt_tokens=12000, output_tokens=20),
        ],
    )
    short_s, pod_waits = [], []
    for limit_s in (0.0, 0.2):
        setup = Setup(profile=pods, pods=2, routers=routers, overload_prefill_s=limit_s)
        simulation = Simulation(setup, crowd, FACTORIES["prefix"](), 1)
        samples = simulation.run().stages[0].samples
        assert len(samples) == len(crowd.stages[0].sessions)
        assert all(s.first_s > 0 and not s.failed for s in samples)
        assert sum(v.bookings.inflight_requests for v in simulation._views) == 0
        assert not simulation._held
        assert all(len(line) == 0 for line in simulation._lines)
        firsts = sorted(s.first_s - s.sent_s for s in samples if s.prompt_tokens < 1000)
        short_s.append(firsts[len(firsts) // 2])
        pod_waits.append(max(simulation.outcome.stages[0].waiting))
    assert short_s[1] < 0.6 * short_s[0]
    assert pod_waits[1] <= pod_waits[0]
