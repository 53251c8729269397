"""Whatever happens in between, the index ends up saying what the pods hold, and leaves nothing behind."""

import pytest

from tests.sim.world import World


@pytest.mark.parametrize("seed", range(200))
def test_the_index_tells_the_truth(seed: int) -> None:
    World(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(2, 20))
def test_the_index_tells_the_truth_in_many_worlds(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        World(seed).run(steps=150)
