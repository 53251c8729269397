"""Every scenario and regime is answered when a crowd sends it over HTTP; a sample of each, the lengths as they are."""

from __future__ import annotations

import msgspec
import pytest

from loadtest.crowd import Crowd, Target
from loadtest.experiment import load_experiment
from loadtest.fleet import TINY_MODEL, PodConfig, running_fleet
from loadtest.prompts import Prompts, plain_words
from loadtest.workload import Session
from tests.integration.test_fleet import PROFILE
from tests.unit.loadtest.test_crowd import FILES

ROOMY = msgspec.structs.replace(
    PROFILE, num_blocks=200_000, max_model_len_tokens=1_000_000, prefill_tokens_per_s=1e9, max_num_batched_tokens=10**6
)


QUICK = {"agents-tools", "azure-conversation", "bursts-32", "chat-30", "hot-prefix", "quick", "rag", "tau-bench"}
"""One of each kind; the thorough lane sends them all."""


@pytest.mark.parametrize(
    "name", [pytest.param(p.stem, marks=() if p.stem in QUICK else pytest.mark.slow) for p in FILES]
)
async def test_a_sample_of_every_regime_is_answered(name: str) -> None:
    experiment = load_experiment(name)
    stage = next(s for s in experiment.build(1).stages if s.measured)
    sessions = [
        Session(0.0, tuple(msgspec.structs.replace(t, think_s=0.0, output_tokens=3) for t in s.turns[:2]))
        for s in stage.sessions[:3]
    ]
    api = experiment.client.api
    async with running_fleet([PodConfig(profile=ROOMY, events_port=None)]) as pods:
        target = Target(urls=(pods[0].url,), model="tiny", api=api, timeout_s=60)
        async with Crowd(target, Prompts(plain_words(TINY_MODEL))) as crowd:
            out = await crowd.run(msgspec.structs.replace(stage, seconds=0.0), sessions)
    assert [s.failure for s in out.samples] == [None] * sum(len(s.turns) for s in sessions)
    first = [s for s in out.samples if s.prompt_tokens == min(x.prompt_tokens or 0 for x in out.samples)]
    least = min(sum(segment.tokens for segment in s.turns[0].prompt) for s in sessions)
    if api == "completions":
        assert first[0].prompt_tokens == least
    else:
        assert least < (first[0].prompt_tokens or 0) < least + 100  # the template's own tokens
