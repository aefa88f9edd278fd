"""Advantages against values worked out by hand."""

import math

import pytest
import torch

from cosmos_algos import RewardError, group_advantages, group_ids

NAN = math.nan


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        # Mean 1/2, squared deviations sum to 1, ddof 1: std = sqrt(1/3); 0.5 / 0.57735 = 0.86603.
        ("grpo", [0, 1, 0, 1], [-0.866025, 0.866025, -0.866025, 0.866025]),
        ("dr_grpo", [0, 1, 0, 1], [-0.5, 0.5, -0.5, 0.5]),
        # Mean of the three others: 2/3 for a loser, 1/3 for a winner.
        ("rloo", [0, 1, 0, 1], [-2 / 3, 2 / 3, -2 / 3, 2 / 3]),
        # One group: its deviation is the step's.
        ("batch_std", [0, 1, 0, 1], [-0.866025, 0.866025, -0.866025, 0.866025]),
        # The failed sample takes no part: mean 2 over {1, 3}, std sqrt(2).
        ("grpo", [1, NAN, 3], [-0.707107, 0.0, 0.707107]),
        ("rloo", [1, NAN, 3], [-2.0, 0.0, 2.0]),
        # One left of the group is a singleton.
        ("rloo", [NAN, 5, NAN], [0.0, 0.0, 0.0]),
        ("grpo", [NAN, NAN], [0.0, 0.0]),
    ],
)
def test_advantages_of_one_group(name, rewards, expected):
    advantages = group_advantages(name, floats(rewards), ["g"] * len(rewards))

    torch.testing.assert_close(
        advantages, torch.tensor(expected, dtype=torch.float64), atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "batch_std"])
def test_equal_rewards_and_singletons_have_exactly_no_advantage(name):
    # 0.1 three times has a mean that rounds away from 0.1.
    advantages = group_advantages(name, [0.1, 0.1, 0.1, 7.0], ["a", "a", "a", "b"])

    assert advantages.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_groups_may_be_interleaved_and_differ_in_size():
    advantages = group_advantages("dr_grpo", floats([0, 10, 2, 20, 4]), ["a", "b", "a", "b", "a"])

    assert advantages.tolist() == [-2.0, -5.0, 0.0, 5.0, 2.0]


def test_batch_std_divides_by_the_deviation_of_all_rewards():
    # Rewards 0, 2, 4, 6: variance (9 + 1 + 1 + 9) / 3 = 20/3; centred by group: -1, 1, -1, 1.
    advantages = group_advantages("batch_std", floats([0, 2, 4, 6]), ["a", "a", "b", "b"])

    scale = 1 / (math.sqrt(20 / 3) + 1e-6)
    torch.testing.assert_close(
        advantages, torch.tensor([-scale, scale, -scale, scale], dtype=torch.float64)
    )


def test_group_ids_count_in_order_of_appearance():
    assert group_ids(["x", "y", "x", "z"]).tolist() == [0, 1, 0, 2]


def test_an_empty_step_has_no_advantages():
    assert group_advantages("grpo", [], []).shape == (0,)


def test_one_group_entry_per_reward():
    with pytest.raises(RewardError, match="2 rewards for 1 group entries"):
        group_advantages("grpo", [1.0, 2.0], ["a"])


def floats(numbers):
    return [float(number) for number in numbers]
