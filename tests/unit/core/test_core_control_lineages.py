"""Policy replicas that hang come back with weights that their run has fallen back from.

One lineage of weights is trained: nobody sums gradients over two, no prompt is in weights twice, no
token of lost weights is trained on, validations are answered by weights that the run has, and the
last checkpoint has what the books say; whatever holds staleness, and whoever is asked to leave.
"""

import pytest
from hung_policies import GROUPS_PER_STEP, NUM_STEPS, World, prompts_of

from cosmos_core.control import ALL_DONE
from cosmos_core.control.ending import LOST

NUM_SEEDS, PER_TEST = 200, 25


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, PER_TEST))
def test_one_lineage_is_trained_whoever_hangs_dies_and_comes_back(first: int) -> None:
    num_fallen_back = num_from_rollouts = 0
    for seed in range(first, first + PER_TEST):
        world = World(seed)
        world.go(world.rng.randint(100, 1500))
        world.go(40_000, is_calm=True)
        finished = world.controller.finished
        assert finished, (seed, world.controller.waiting_for(world.now))
        num_fallen_back += world.num_fallen_back > 0
        num_from_rollouts += world.num_from_rollouts
        if finished.endswith(LOST):
            continue  # who had the last weights died before they were saved
        last = world.last_saved()
        trained = list(prompts_of(last))
        if finished == ALL_DONE:
            assert len(last) == NUM_STEPS, seed
        assert len(set(trained)) == len(trained) == len(last) * GROUPS_PER_STEP, seed
        assert world.controller.books().consumed == len(trained), seed
        world.check_validations(last)
    assert num_fallen_back > PER_TEST / 4
    assert num_from_rollouts > 0
