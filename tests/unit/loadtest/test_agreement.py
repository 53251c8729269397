"""Real time against simulation: the regimes for two pods exist, and what counts as agreement."""

import pytest

from loadtest.bench.agreement import PODS, REGIMES, Compared, simulated_p90_s, two_pods
from tests.unit.loadtest.test_report import of, sample, stage


@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime_is_cut_to_a_load_for_two_pods(regime: str) -> None:
    experiment = two_pods(regime)
    assert experiment.client.api == "completions", "a simulated prompt has no template around it"
    turns = [(t, s) for s in experiment.build(1).stages if s.measured for x in s.sessions for t in x.turns]
    tokens_per_s = sum(sum(p.tokens for p in t.prompt) for t, _ in turns) / sum(
        s.seconds for s in {s for _, s in turns}
    )
    assert 2_000 < tokens_per_s / PODS < 100_000


def test_the_simulation_has_a_p90_for_the_same_sessions() -> None:
    assert 0.05 < simulated_p90_s(two_pods("bursts-32"), "prefix", 1) < 5.0


@pytest.mark.parametrize(
    ("real_s", "failed", "agrees"),
    [
        pytest.param(0.2, False, True, id="the same"),
        pytest.param(0.245, False, True, id="a little more"),
        pytest.param(0.26, False, False, id="more than a quarter more"),
        pytest.param(0.14, False, False, id="more than a quarter less"),
        pytest.param(0.2, True, False, id="a request failed"),
    ],
)
def test_agreement_is_within_a_quarter_and_without_failures(real_s: float, failed: bool, agrees: bool) -> None:
    answers = [sample(ttft_s=real_s)] * 10 + [sample(failure="cut")] * failed
    assert Compared("r", "prefix", 0.2, of(stage(answers)), 0.0).agrees == agrees
