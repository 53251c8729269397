"""Every term of the price earns its place: without it a regime is worse by a tenth or more. Emulated, slow lane.

The home of a hot prefix has its test in test_spreading, the adapters' term in test_lora.
"""

import math

import pytest

from loadtest import matrix
from loadtest.matrix_report import Cell
from loadtest.sim_report import percentile

SEED = 2  # of the half that the weights were not searched on


def ttft_s(rule: str, profile: str, regime: str, p: float) -> float:
    _, outcome = matrix.load_plan().make(Cell(profile, regime, rule, SEED))
    return percentile([t for t in matrix.measured_ttft_s(outcome) if t < math.inf], p)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "profile", "regime", "p"),
    [
        pytest.param("alpha=0", "slow-gpu", "rag", 0.9, id="alpha"),
        pytest.param("beta_per_request=0", "slow-gpu", "rag", 0.9, id="beta"),
        pytest.param("crowd_half_requests=1e9", "llama-3.1-8b-h100", "hot-prefix", 0.9, id="crowd"),
        pytest.param("n0_requests=1e6", "llama-3.1-8b-h100", "scale-5-to-8", 0.99, id="company"),
        pytest.param("w_kv_prompts=0", "slow-gpu", "chat-over-saturation", 0.9, id="held KV"),
        pytest.param("placement_miss_ratio=2", "llama-3.1-8b-h100", "zipf", 0.9, id="placement"),
        pytest.param("predict=0", "qwen3-32b-2xh100", "hot-prefix", 0.9, id="predictions"),
        pytest.param("learn_rates=0", "llama-3.1-8b-h100", "two-slow-pods", 0.99, id="learnt rates"),
    ],
)
def test_without_it_a_regime_is_worse(without: str, profile: str, regime: str, p: float) -> None:
    assert ttft_s(f"prefix:{without}", profile, regime, p) > 1.1 * ttft_s("prefix", profile, regime, p)
