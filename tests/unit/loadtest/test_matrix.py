"""The matrix: who lost, by how much, how surely, and what is run for it."""

import argparse
from array import array
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from loadtest import matrix, workload
from loadtest.matrix_report import Cell, Run, csv_table, interval_s, judge, pooled_s, ratio_tables, verdict_table
from loadtest.profile import load_profile
from loadtest.sim_report import Row, percentile
from loadtest.sim_scenario import load_regime
from loadtest.simulate import run_one


def run_of(rule: str, ttft_s: Sequence[float], seed: int = 1, step_s: float = 0.02) -> Run:
    row = Row("all", len(ttft_s), 0, 0, 0, 0, 0, step_s, 0, 0, 0.5, 100.0, 1.1, 0, 0, 0, 0, 0)
    return Run(Cell("a-profile", "a-regime", rule, seed), 1.0, row, array("f", ttft_s).tobytes())


def noisy(mean_s: float, seed: int, count: int = 2000) -> list[float]:
    rng = Random(seed)
    return [rng.expovariate(1 / mean_s) for _ in range(count)]


def runs(**means_s: float) -> list[Run]:
    return [run_of(rule, noisy(mean_s, seed), seed) for rule, mean_s in means_s.items() for seed in (1, 2, 3)]


@pytest.mark.parametrize(
    ("ours_s", "lost"),
    [
        pytest.param(0.9, False, id="better than the best of the others"),
        pytest.param(1.08, False, id="worse by less than a tenth"),
        pytest.param(1.3, True, id="worse by more, surely"),
    ],
)
def test_a_rule_loses_where_it_is_surely_worse_than_allowed(ours_s: float, lost: bool) -> None:
    p90, p99 = judge(runs(prefix=ours_s, other=1.0, bad=5.0), "prefix")
    assert (p90.best_rule, p90.lost, p99.lost) == ("other", lost, lost)
    assert p90.ratio == pytest.approx(ours_s, rel=0.01)


def test_a_decode_step_is_allowed_where_it_is_more_than_a_tenth() -> None:
    (p90, _) = judge([run_of("prefix", [0.11] * 100, step_s=0.02), run_of("other", [0.095] * 100)], "prefix")
    assert p90.allowed_s == pytest.approx(0.02)
    assert not p90.lost


def test_a_p99_that_one_stretch_made_is_not_surely_worse() -> None:
    """A single bad spell among sixty blocks: the pooled p99 is far worse, a resample without the spell is not."""
    calm = [0.1] * 2000
    spell = calm[:1900] + [9.0] * 100
    (_, p99) = judge(
        [run_of("prefix", spell, 1), run_of("prefix", calm, 2), run_of("other", calm, 1), run_of("other", calm, 2)],
        "prefix",
    )
    assert p99.ratio > 50
    assert p99.low_s == 0.0
    assert p99.high_s > 8
    assert not p99.lost


def test_the_oracle_is_the_best_rule_that_was_given_the_truth() -> None:
    made = [*runs(prefix=1.0, other=2.0), run_of("prefix+oracle", [0.7] * 100), run_of("other+oracle", [0.4] * 100)]
    (p90, _) = judge(made, "prefix")
    assert p90.best_rule == "other"
    assert p90.oracle_s == pytest.approx(0.4)
    assert "oracle" in ratio_tables(made)
    assert "1 lost" not in verdict_table([p90])
    assert csv_table(made).count("\n") == 1 + 4


def test_the_interval_holds_the_difference_that_a_plain_recount_finds() -> None:
    ours, theirs = runs(ours=1.2)[:3], runs(theirs=1.0)[:3]
    low, high = interval_s(ours, theirs, 0.99)
    assert low < pooled_s(ours, 0.99) - pooled_s(theirs, 0.99) < high
    everything = [t for seed in (1, 2, 3) for t in noisy(1.2, seed)]
    assert pooled_s(ours, 0.99) == pytest.approx(percentile(everything, 0.99), rel=1e-6)


def test_the_plan_names_what_exists() -> None:
    plan = matrix.load_plan()
    assert len(plan.profiles) == 3
    for name in plan.profiles:
        assert load_profile(name).judged
    for name in plan.regimes:
        load_regime(name)
    assert set(plan.share) <= set(plan.profiles)
    assert all(set(shares) <= set(plan.regimes) for shares in plan.share.values())
    assert set(plan.with_truth) <= set(plan.rules)


def test_what_was_run_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    matrix.add_arguments(parser)
    flags = ["--dir", str(tmp_path), "--profile", "qwen3-32b-2xh100", "--scenario", "decode-heavy", "--seeds", "1"]
    args = parser.parse_args([*flags, "--policy", "prefix", "--policy", "random", "--csv", str(tmp_path / "all.csv")])
    assert matrix.run(args) == 0
    assert matrix.run(args) == 0
    assert "2 runs, 2 of them to be made" in (out := capsys.readouterr().out)
    assert "2 runs, 0 of them to be made" in out
    assert "0 lost" in out
    assert (tmp_path / "all.csv").read_text().count("decode-heavy") == 2


def test_a_rule_with_other_costs_is_another_rule() -> None:
    regime = load_regime("mixed-lengths")
    profile = load_profile(regime.profile)
    plain, _ = run_one(regime, profile, "prefix", 1, share=0.1)
    blind, _ = run_one(regime, profile, "prefix:alpha=0,beta_per_request=0,predict=0", 1, share=0.1)
    assert plain.rows != blind.rows
    with pytest.raises(ValueError, match="no field 'gamma'"):
        run_one(regime, profile, "prefix:gamma=1", 1)


def test_a_shortened_workload_is_the_beginning_of_the_whole() -> None:
    whole = workload.cold(1, rate=10, seconds=20, prompt_tokens=10, output_tokens=1)
    part = workload.shortened(whole, 0.25)
    (sessions,) = (s.sessions for s in part.stages)
    assert sessions == whole.stages[0].sessions[: len(sessions)]
    assert max(s.start_s for s in sessions) <= 5.0 < whole.stages[0].sessions[len(sessions)].start_s
    assert workload.shortened(whole, 1.0) is whole
