"""The calibration command against an emulated pod, over HTTP. How fast this machine is decides nothing here."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from loadtest import calibrate
from loadtest.fleet import PodConfig, running_fleet
from loadtest.profile import load_profile


async def measured(out: Path, url: str | None = None) -> int:
    profile = msgspec.structs.replace(load_profile("laptop-toy"), max_model_len_tokens=2400, num_blocks=999)
    async with running_fleet([PodConfig(profile=profile, events_port=None, replay_port=None, speed=4.0)]) as pods:
        argv = ["--url", url or pods[0].url, "--name", "toy", "--out", str(out)]
        return await asyncio.to_thread(calibrate.main, argv)


async def test_a_pod_is_measured_and_its_profile_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "toy.toml"
    assert await measured(out) == 0, capsys.readouterr().out
    profile = load_profile(str(out))
    assert (profile.block_size_tokens, profile.num_blocks, profile.max_model_len_tokens) == (16, 999, 2400)
    assert profile.prefill_tokens_per_s > 0
    assert not profile.calibrated


async def test_what_is_no_pod_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "none.toml"
    assert await measured(out, "http://127.0.0.1:9") == 1
    assert "could not be measured" in capsys.readouterr().out
    assert not out.exists()
