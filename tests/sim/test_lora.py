"""LoRA adapters on pods with few slots. Emulated pods, virtual time; a term that brings nothing has no place."""

import msgspec
import pytest

from loadtest import sim_scenario
from loadtest.sim_policies import FACTORIES
from loadtest.sim_report import Row, row
from loadtest.sim_world import Simulation
from router.policy.pick import Costs


def run(rule: str = "prefix", costs: Costs | None = None, seed: int = 1, **world: object) -> tuple[Simulation, Row]:
    regime = sim_scenario.load_regime("lora")
    workload = [{**regime.workload[0], "seconds": 30.0}]
    regime = msgspec.structs.replace(regime, workload=workload, world=msgspec.structs.replace(regime.world, **world))
    profile = sim_scenario.profile_of(regime)
    load = sim_scenario.build(regime, profile, seed)
    simulation = Simulation(sim_scenario.setup(regime, profile), load, FACTORIES[rule](), seed, costs=costs)
    return simulation, row(rule, simulation.run().stages, regime.pods)


@pytest.mark.parametrize("seed", [1, 2])
def test_without_the_adapters_term_the_regime_collapses(seed: int) -> None:
    with_term = run(seed=seed)[1]
    without = run(costs=Costs(w_adapter=0.0), seed=seed)[1]
    assert without.ttft_p90_s > 5 * with_term.ttft_p90_s
    assert without.output_tokens_per_s < 0.95 * with_term.output_tokens_per_s


@pytest.mark.parametrize("rule", ["consistent-hash", "static-partition"])
def test_a_fixed_home_for_each_adapter_is_no_better(rule: str) -> None:
    assert run()[1].ttft_p90_s <= 1.1 * run(rule)[1].ttft_p90_s


def test_adapters_that_all_fit_cost_nothing() -> None:
    """With a slot for each on every pod the term says nothing after the first loading."""
    with_term, without = run(max_loras=40, lora_load_s=0.01)[1], run(costs=Costs(w_adapter=0.0), max_loras=40)[1]
    assert with_term.ttft_p90_s <= 1.1 * without.ttft_p90_s


@pytest.mark.parametrize("routers", [1, 3])
def test_every_adapter_is_given_back(routers: int) -> None:
    simulation, figures = run(routers=routers)
    assert figures.failed == 0
    for view in simulation._views:
        assert not any(view.adapters.in_flight(w) for w in simulation._workers)
    assert all(not p.engine.gauges().running_adapters for p in simulation._pods)
