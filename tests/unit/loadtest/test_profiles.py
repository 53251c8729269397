"""Profiles and regimes are data: each must load, name its sources, and be buildable."""

from pathlib import Path

import msgspec
import pytest

from loadtest import sim_scenario
from loadtest.profile import PROFILES_DIR, Profile, load_profile

TRACES = Path(__file__).parents[2] / "data" / "traces"
NAMES = sorted(p.stem for p in PROFILES_DIR.glob("*.toml"))
MEASURED = {
    "prefill_tokens_per_s", "t0_s", "c_kv_s", "c_seq_s", "attention_equal_context_tokens", "frontend_s",
    "block_size_tokens", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len_tokens",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_constant_of_a_judged_profile_has_a_source(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    if profile.judged:
        assert set(profile.sources) >= MEASURED
        assert profile.calibrated or profile.calibration_note


def test_the_published_pod_has_the_published_cache() -> None:
    profile = load_profile("qwen3-32b-2xh100")
    assert profile.kv_cache_tokens == 307_328


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(FileNotFoundError, match="laptop-toy"):
        load_profile("no-such")


def test_vllms_own_rule_on_the_token_budget() -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        msgspec.structs.replace(load_profile("laptop-toy"), max_num_batched_tokens=8).__post_init__()


@pytest.mark.parametrize("name", [n for n in sim_scenario.names() if n != "thousand-pods"])
def test_every_regime_builds_for_every_judged_profile(name: str) -> None:
    regime = sim_scenario.load_regime(name)
    sizes = []
    for profile_name in ("qwen3-32b-2xh100", "slow-gpu"):
        profile = load_profile(profile_name)
        built = sim_scenario.build(regime, profile, 1, TRACES)
        world = sim_scenario.setup(regime, profile)
        assert isinstance(world.profile, Profile)
        sizes.append(sum(len(s.sessions) for s in built.stages))
    assert min(sizes) > 30
    assert sizes[1] == pytest.approx(sizes[0], rel=0.25), "another kind of pod gets as many requests, slower"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('about = "x"\n[[workload]]\nkind = "nonsense"', "nonsense"),
        ('about = "x"\n[[workload]]\nkind = "cold"\nsurplus = 1', "does not fit"),
        ('about = "x"\nworkload = []\nsurplus = 1', "surplus"),
        ("about = ", "broken.toml"),
    ],
)
def test_a_bad_regime_is_refused_with_the_cure(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        sim_scenario.build(sim_scenario.load_regime(str(path)), load_profile("laptop-toy"), 1)
