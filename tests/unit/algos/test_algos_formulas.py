"""Every advantage against a loop in plain Python floats, written from its formula."""

import itertools
import math
import random
import statistics

import pytest
import torch

from cosmos_algos import (
    AlgorithmConfigError,
    RewardError,
    StepRewards,
    group_advantages,
    step_advantages,
)

NAN = math.nan


def unequal_step(seed, binary=False):
    """Groups of 1 to 6 samples, interleaved, some failed, some without signal."""
    rng = random.Random(seed)
    rows = []
    for group, size in enumerate([1, 2, 3, 4, 6, 3]):
        for _ in range(size):
            reward = float(rng.random() < 0.5) if binary else rng.uniform(0.0, 2.0)
            rows.append((0.25 if group == 5 and not binary else reward, group, rng.randint(1, 9)))
    if not binary:
        rows.append((NAN, 3, 4))
    rng.shuffle(rows)
    rewards, groups, tokens = zip(*rows, strict=True)
    return StepRewards(rewards=rewards, groups=groups, num_tokens=tokens)


def looped(name, step, k=1):
    rows = list(zip(step.rewards, step.groups, step.num_tokens, strict=True))
    present = [row for row in rows if not math.isnan(row[0])]
    answer = []
    for reward, group, _ in rows:
        mates = [(r, n) for r, g, n in present if g == group]
        has_signal = len({r for r, _ in mates}) > 1 or name == "reinforce_pp"
        known = has_signal and not math.isnan(reward)
        answer.append(LOOPS[name](reward, mates, present, k) if known else 0.0)
    return answer


def mean_reward(mates):
    return sum(r for r, _ in mates) / len(mates)


def whitened_over_tokens(value, values):
    """``values`` holds (x, n): x at n tokens."""
    tokens = [x for x, n in values for _ in range(n)]
    return (value - statistics.fmean(tokens)) / math.sqrt(statistics.variance(tokens) + 1e-8)


def centred(present):
    groups = {g for _, g, _ in present}
    means = {g: mean_reward([(r, n) for r, h, n in present if h == g]) for g in groups}
    return [(r - means[g], n) for r, g, n in present]


LOOPS = {
    "grpo": lambda r, mates, _, k: (
        (r - mean_reward(mates)) / (statistics.stdev([x for x, _ in mates]) + 1e-6)
    ),
    "dr_grpo": lambda r, mates, _, k: r - mean_reward(mates),
    "rloo": lambda r, mates, _, k: r - (sum(x for x, _ in mates) - r) / (len(mates) - 1),
    "batch_std": lambda r, mates, present, k: (
        (r - mean_reward(mates)) / (statistics.stdev([x for x, _, _ in present]) + 1e-6)
    ),
    "max_rl": lambda r, mates, _, k: (r - mean_reward(mates)) / mean_reward(mates),
    "opo": lambda r, mates, _, k: r - sum(x * n for x, n in mates) / sum(n for _, n in mates),
    "reinforce_pp": lambda r, _, present, k: whitened_over_tokens(
        r, [(x, n) for x, _, n in present]
    ),
    "reinforce_pp_baseline": lambda r, mates, present, k: whitened_over_tokens(
        r - mean_reward(mates), centred(present)
    ),
    "pass_at_k": lambda r, mates, _, k: best_of_k([x for x, _ in mates], r, min(k, len(mates))),
}


def best_of_k(rewards, reward, k):
    """Mean best reward of the k-subsets that hold this sample, against all k-subsets."""
    every = [max(rewards[i] for i in s) for s in itertools.combinations(range(len(rewards)), k)]
    me = rewards.index(reward)
    mine = [
        max(rewards[i] for i in s)
        for s in itertools.combinations(range(len(rewards)), k)
        if me in s
    ]
    deviation = statistics.pstdev(every)
    return (statistics.fmean(mine) - statistics.fmean(every)) / deviation if deviation else 0.0


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "name",
    [
        "grpo",
        "dr_grpo",
        "rloo",
        "batch_std",
        "max_rl",
        "opo",
        "reinforce_pp",
        "reinforce_pp_baseline",
    ],
)
def test_unequal_groups_with_failures_follow_the_formula(name, seed):
    step = unequal_step(seed)

    advantages = step_advantages(name, step)

    expected = torch.tensor(looped(name, step), dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_an_average_over_all_choices_of_k(k):
    step = unequal_step(7, binary=True)

    advantages = step_advantages("pass_at_k", step, k=k)

    expected = torch.tensor(looped("pass_at_k", step, k), dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "rewards", "tokens", "expected"),
    [
        # Mean 1/4: the winner (1 - 1/4)/(1/4) = 3, losers -1.
        ("max_rl", [1, 0, 0, 0], [1, 1, 1, 1], [3, -1, -1, -1]),
        # Baseline (1·1 + 0·3)/4: the longer wrong answer pulls it down.
        ("opo", [1, 0], [1, 3], [0.75, -0.25]),
        # Tokens 1 0 0 0: mean 1/4, ddof-1 variance 1/4, deviation 1/2.
        ("reinforce_pp", [1, 0], [1, 3], [1.5, -0.5]),
        # Centred ±1/2 with tokens +, -, -, -: mean -1/4, variance 1/4.
        ("reinforce_pp_baseline", [1, 0], [1, 3], [1.5, -0.5]),
        ("reward", [1, NAN], [1, 1], [1, 0]),
        ("none", [1, 0], [1, 1], [0, 0]),
    ],
)
def test_advantages_by_hand(name, rewards, tokens, expected):
    rewards = [float(reward) for reward in rewards]
    step = StepRewards(rewards=rewards, groups=["g"] * len(rewards), num_tokens=tokens)

    advantages = step_advantages(name, step)

    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)


def test_pass_at_2_by_hand():
    # One right of four. C(3,2)/C(4,2) = 1/2, so p = 1/2, σ = 1/2. The right one: (1 - 1/2)/σ = 1.
    # A wrong one is with two wrong of three others: 1 - C(2,1)/C(3,1) = 1/3, (1/3 - 1/2)/σ = -1/3.
    step = StepRewards(rewards=[1.0, 0.0, 0.0, 0.0], groups=[0] * 4, num_tokens=[1] * 4)

    advantages = step_advantages("pass_at_k", step, k=2)

    assert advantages.tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_one_winner_of_eight_is_worth_more_than_a_loser_and_the_group_sums_to_zero():
    # A leave-one-out deviation would divide the winner by 0 and leave it at its bare +1.
    advantages = group_advantages("grpo", [1.0] + [0.0] * 7, ["g"] * 8)

    assert advantages.tolist()[:2] == pytest.approx([2.474868, -0.353553], abs=1e-4)
    assert advantages.sum().item() == pytest.approx(0.0, abs=1e-12)


def test_a_deviation_over_two_of_four_has_ddof_1():
    # ±0.5 / sqrt(1/3): ±0.866, where ddof 0 gives ±1.
    advantages = group_advantages("grpo", [0.0, 0.0, 1.0, 1.0], ["g"] * 4)

    assert advantages.abs().tolist() == pytest.approx([0.8660239] * 4, abs=2e-6)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "batch_std", "max_rl", "opo", "reinforce_pp_baseline"]
)
def test_a_group_of_one_has_advantage_0_and_not_its_reward(name):
    step = StepRewards(rewards=[3.0, 1.0, 2.0], groups=["alone", "g", "g"], num_tokens=[2, 2, 2])

    assert step_advantages(name, step)[0].item() == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: step("max_rl", [1.0, -1.0]), r"max_rl: sample 1 .* reward -1; .* at least 0"),
        (lambda: step("pass_at_k", [0.5, 1.0]), r"pass_at_k: sample 0 .* reward 0\.5; .* 0 or 1"),
        (lambda: step("grpo", [0.0, math.inf]), r"sample 1 of the step \(group g\): reward inf"),
        (
            lambda: StepRewards(rewards=[1.0], groups=["g", "h"], num_tokens=[1]),
            "1 rewards for 2 group entries and 1 token counts",
        ),
    ],
)
def test_a_reward_without_meaning_is_an_error_that_names_the_sample(make, message):
    with pytest.raises(RewardError, match=message):
        make()


def test_a_formula_that_needs_token_counts_says_where_it_is():
    with pytest.raises(AlgorithmConfigError, match="'opo' needs more than rewards and groups"):
        group_advantages("opo", [1.0, 0.0], ["g", "g"])


def step(name, rewards):
    return step_advantages(
        name,
        StepRewards(rewards=rewards, groups=["g"] * len(rewards), num_tokens=[1] * len(rewards)),
    )
