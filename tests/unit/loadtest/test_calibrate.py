"""Calibration: the fit finds the constants that made the measurements, and the profile it writes can be used."""

import re
from pathlib import Path
from random import Random

import pytest

from loadtest.calibrate import (
    CalibrationError,
    Decode,
    Fit,
    PodFacts,
    Prefill,
    fit,
    least_squares,
    profile_text,
)
from loadtest.profile import load_profile

TRUE = Fit(
    prefill_tokens_per_s=20_000.0, attention_equal_context_tokens=31_000.0, t0_s=0.012, c_seq_s=30e-6, c_kv_s=48e-9,
    frontend_s=0.07,
)  # fmt: skip


def measurements(rng: Random, noise_ratio: float) -> tuple[list[Prefill], list[Decode]]:
    def noisy(x: float) -> float:
        return x * (1 + rng.uniform(-noise_ratio, noise_ratio))

    prefills = [
        Prefill(
            n,
            noisy(
                TRUE.frontend_s
                + TRUE.t0_s
                + n * (1 + n / 2 / TRUE.attention_equal_context_tokens) / TRUE.prefill_tokens_per_s
            ),
        )
        for n in (256, 1024, 2048, 4096, 6144, 8192)
        for _ in range(3)
    ]
    decodes = [
        Decode(n, context, noisy(TRUE.t0_s + n * TRUE.c_seq_s + n * context * TRUE.c_kv_s))
        for n in (1, 4, 16, 64)
        for context in (128, 4096)
    ]
    return prefills, decodes


@pytest.mark.parametrize("seed", range(5))
def test_the_fit_finds_the_constants(seed: int) -> None:
    found = fit(*measurements(Random(seed), 0.002))
    assert found.prefill_tokens_per_s == pytest.approx(TRUE.prefill_tokens_per_s, rel=0.1)
    assert found.attention_equal_context_tokens == pytest.approx(TRUE.attention_equal_context_tokens, rel=0.5)
    assert found.t0_s == pytest.approx(TRUE.t0_s, rel=0.05)
    assert found.c_kv_s == pytest.approx(TRUE.c_kv_s, rel=0.1)
    assert found.frontend_s == pytest.approx(TRUE.frontend_s, rel=0.1)


def test_nothing_is_negative_however_noisy() -> None:
    for seed in range(30):
        found = fit(*measurements(Random(seed), 0.5))
        assert found.prefill_tokens_per_s > 0
        assert found.t0_s > 0
        assert found.c_seq_s >= 0
        assert found.c_kv_s >= 0
        assert found.frontend_s >= 0


def test_too_little_is_an_error() -> None:
    with pytest.raises(CalibrationError, match="too few"):
        least_squares([[1.0, 2.0], [1.0, 2.0]], [1.0, 1.0])
    with pytest.raises(CalibrationError, match="nothing"):
        least_squares([], [])


def test_the_profile_that_is_written_can_be_loaded(tmp_path: Path) -> None:
    facts = PodFacts(model='a "model"', max_model_len_tokens=4096, block_size_tokens=32, num_blocks=300)
    path = tmp_path / "mine.toml"
    path.write_text(profile_text("mine", facts, TRUE, {"max_num_seqs": 64}))
    profile = load_profile(str(path))
    assert (profile.max_num_seqs, profile.max_num_batched_tokens) == (64, 8192)
    assert profile.sources["max_num_seqs"] == "given on the command line"
    assert profile.sources["max_num_batched_tokens"].startswith("assumed")
    assert profile.model == facts.model
    assert profile.t0_s == TRUE.t0_s
    assert profile.kv_cache_tokens == 32 * 300
    assert not profile.calibrated
    assert not re.search("http://", path.read_text()), "no address in a file that will be shared"
