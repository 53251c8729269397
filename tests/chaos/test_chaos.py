"""Twenty seconds of the chaos run (`python -m tests.chaos.run` is the ten minutes)."""

from __future__ import annotations

import pytest

from tests.chaos.run import chaos


@pytest.mark.slow
async def test_chaos_twenty_seconds_add_up() -> None:
    run, state, problems = await chaos(seconds=20, seed=7)
    assert not problems, (problems, state, run.ledger)
