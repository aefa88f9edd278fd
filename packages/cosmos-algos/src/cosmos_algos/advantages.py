"""Advantages of the samples of a step from their rewards, relative to their group.

One number per sample, in float64. Three rules hold for every formula with a group baseline: a
group whose rewards are all equal has advantage 0, a group of one has advantage 0 (its baseline is
itself), and a failed sample (reward NaN) takes no part in any statistic and has advantage 0.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from cosmos_algos.arguments import check_choice, check_same_shape, group_keys
from cosmos_algos.errors import AlgorithmConfigError, RewardError
from cosmos_algos.group_statistics import GroupStatistics

AdvantageName = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "batch_std",
    "max_rl",
    "opo",
    "pass_at_k",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "reward",
    "none",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRewards:
    """What advantages are worked out from: the samples of a whole step, in any order.

    Attributes:
        rewards: one per sample; NaN for a failed one.
        groups: the group each sample belongs to.
        num_tokens: trained tokens of each sample.
        lengths: sampled tokens of each, which are OPO's lengths, where not all of them are trained
            on: a sample that is left out of the loss counts in its group's baseline. ``None`` for
            ``num_tokens``.

    Raises:
        RewardError: if the lengths differ, or a reward is infinite.
    """

    rewards: Sequence[float]
    groups: Sequence[Hashable]
    num_tokens: Sequence[int]
    lengths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Refuse columns of different lengths and rewards that no statistic survives."""
        counts = (len(self.rewards), len(self.groups), len(self.num_tokens))
        if len({*counts, len(self.sampled)}) != 1:
            lengths = "" if self.lengths is None else f", {len(self.lengths)} lengths"
            raise RewardError(
                f"advantages: {counts[0]} rewards for {counts[1]} group entries and "
                f"{counts[2]} token counts{lengths}"
            )
        for index, reward in enumerate(self.rewards):
            if math.isinf(reward):
                raise RewardError(
                    f"sample {index} of the step (group {self.groups[index]}): reward {reward}; "
                    "a reward is finite, or NaN for a sample that failed"
                )

    @property
    def sampled(self) -> Sequence[int]:
        """Tokens of each sample, trained on or not."""
        return self.num_tokens if self.lengths is None else self.lengths


def group_ids(groups: Sequence[Hashable] | Tensor) -> Int64[Tensor, " N"]:
    """Number groups from 0 in order of first appearance: ``["a", "b", "a"]`` is ``[0, 1, 0]``."""
    numbers: dict[Hashable, int] = {}
    ids = [numbers.setdefault(key, len(numbers)) for key in group_keys(groups)]
    return torch.tensor(ids, dtype=torch.int64)


def grpo_advantages(
    rewards: Float[Tensor, " N"], groups: Int64[Tensor, " N"], eps: float = 1e-6
) -> Float64[Tensor, " N"]:
    """Return A = (R - mean_g) / (std_g + eps), std with ddof 1 (GRPO, arXiv 2402.03300, eq. 3)."""
    stats = GroupStatistics(rewards, groups)
    variance = stats.sum(stats.centred**2) / (stats.count - 1).clamp(min=1)
    return stats.informative(stats.centred / (variance.sqrt() + eps))


def dr_grpo_advantages(
    rewards: Float[Tensor, " N"], groups: Int64[Tensor, " N"]
) -> Float64[Tensor, " N"]:
    """Return A = R - mean_g: GRPO without the division by std_g (Dr. GRPO, arXiv 2503.20783).

    The division favours groups that are nearly all right or all wrong.
    """
    stats = GroupStatistics(rewards, groups)
    return stats.informative(stats.centred)


def rloo_advantages(
    rewards: Float[Tensor, " N"], groups: Int64[Tensor, " N"]
) -> Float64[Tensor, " N"]:
    """Return A_i = R_i - Σ_{j≠i} R_j / (G - 1) = G/(G-1) (R_i - mean_g).

    The mean of the others as baseline leaves the gradient unbiased (RLOO, arXiv 2402.14740).
    """
    stats = GroupStatistics(rewards, groups)
    return stats.informative(stats.centred * stats.count / (stats.count - 1).clamp(min=1))


def batch_std_advantages(
    rewards: Float[Tensor, " N"], groups: Int64[Tensor, " N"], eps: float = 1e-6
) -> Float64[Tensor, " N"]:
    """Return A = (R - mean_g) / (std + eps), std (ddof 1) over all rewards of the step.

    Normalisation by the batch, as ScaleRL has it (arXiv 2510.13786).
    """
    stats = GroupStatistics(rewards, groups)
    present = stats.rewards[stats.present]
    std = present.std() if present.numel() > 1 else present.new_zeros(())
    return stats.informative(stats.centred / (std + eps))


def max_rl_advantages(
    rewards: Float[Tensor, " N"], groups: Int64[Tensor, " N"]
) -> Float64[Tensor, " N"]:
    """Return A = (R - mean_g) / mean_g (MaxRL, arXiv 2602.02710).

    For rewards 0 and 1, p = mean_g is the success rate, and ∇ log p = ∇p / p: the weight 1/p is
    what makes a gradient of the success rate one of its logarithm.

    Raises:
        RewardError: if a reward is negative: no success rate is.
    """
    stats = GroupStatistics(rewards, groups)
    _refuse("max_rl", stats.rewards, stats.rewards < 0.0, "at least 0")
    return stats.informative(stats.centred / stats.mean.clamp(min=1e-12))


def opo_advantages(
    rewards: Float[Tensor, " N"], groups: Int64[Tensor, " N"], num_tokens: Int64[Tensor, " N"]
) -> Float64[Tensor, " N"]:
    """Return A = R - Σ_j T_j R_j / Σ_j T_j over the group (OPO, arXiv 2505.23585).

    The baseline of least variance is b = E[‖∇ log π‖² R] / E[‖∇ log π‖²], which is this if a
    sample's squared gradient grows with its length T.
    """
    check_same_shape("advantage opo", {"rewards": rewards, "num_tokens": num_tokens})
    stats = GroupStatistics(rewards, groups)
    lengths = num_tokens.double() * stats.present
    baseline = stats.sum(lengths * stats.rewards) / stats.sum(lengths).clamp(min=1)
    return stats.informative(stats.rewards - baseline)


def pass_at_k_advantages(
    rewards: Float[Tensor, " N"], groups: Int64[Tensor, " N"], k: int
) -> Float64[Tensor, " N"]:
    """Return the advantage of being in a random k of the group, of which the best counts.

    With N samples, N⁻ of them wrong, p = 1 - C(N⁻,k)/C(N,k) and σ² = p(1 - p): a right sample has
    (1 - p)/σ, a wrong one (1 - C(N⁻-1,k-1)/C(N-1,k-1) - p)/σ (Pass@k training,
    arXiv 2508.10751). k = 1 is GRPO's with ddof 0. A group that has lost samples and is smaller
    than k counts as one of k; where every choice of k succeeds, the advantage is 0.

    Raises:
        AlgorithmConfigError: if k is below 1.
        RewardError: if a reward is neither 0 nor 1.
    """
    if k < 1:
        raise AlgorithmConfigError(f"advantage pass_at_k: k is {k}; it must be 1 or more")
    stats = GroupStatistics(rewards, groups)
    other = (stats.rewards != 0.0) & (stats.rewards != 1.0)
    _refuse("pass_at_k", stats.rewards, other, "0 or 1")
    wrong = stats.count - stats.sum(stats.rewards)
    drawn = stats.count.clamp(max=k)
    success = 1.0 - _share_of_choices(wrong, stats.count, drawn)
    given_wrong = 1.0 - _share_of_choices(wrong - 1, stats.count - 1, drawn - 1)
    deviation = (success * (1.0 - success)).sqrt()
    advantages = torch.where(stats.rewards == 1.0, 1.0, given_wrong) - success
    certain = (success == 0.0) | (success == 1.0)
    return stats.informative(advantages / deviation.masked_fill(certain, 1.0) * ~certain)


def reinforce_pp_advantages(
    rewards: Float[Tensor, " N"], num_tokens: Int64[Tensor, " N"], eps: float = 1e-8
) -> Float64[Tensor, " N"]:
    """Return A_i = (R_i - mean) / sqrt(var + eps), mean = Σ_i T_i R_i / Σ_i T_i, var with ddof 1.

    REINFORCE++ (arXiv 2501.03262) for a reward at the last token and no discount: every
    token of a sample has the return R. There is no group: equal rewards in a group are a signal.
    With a KL penalty in the reward see ``Algorithm.with_returns``, which whitens both.
    """
    check_same_shape("advantage reinforce_pp", {"rewards": rewards, "num_tokens": num_tokens})
    present = ~rewards.isnan()
    return _token_whitened(rewards.double(), num_tokens * present, eps).where(present, 0.0)


def reinforce_pp_baseline_advantages(
    rewards: Float[Tensor, " N"],
    groups: Int64[Tensor, " N"],
    num_tokens: Int64[Tensor, " N"],
    eps: float = 1e-8,
) -> Float64[Tensor, " N"]:
    """Return A = (B - mean) / sqrt(var + eps), B = R - mean_g, moments over all tokens of the step.

    REINFORCE++ with a baseline (arXiv 2501.03262). Groups without two different rewards take part
    in mean and variance and keep 0.
    """
    check_same_shape("advantage reinforce_pp", {"rewards": rewards, "num_tokens": num_tokens})
    stats = GroupStatistics(rewards, groups)
    return stats.informative(_token_whitened(stats.centred, num_tokens * stats.present, eps))


def step_advantages(name: AdvantageName, step: StepRewards, *, k: int = 1) -> Float64[Tensor, " N"]:
    """Return the advantages of a step by the name of their formula.

    Args:
        name: of the formula; ``reward`` is R itself, for algorithms whose baseline is a critic, and
            ``none`` is 0, for those that learn from a teacher alone.
        step: all samples of the step.
        k: of ``pass_at_k``.

    Raises:
        AlgorithmConfigError: if there is no such formula.
        RewardError: if the formula has no meaning for a reward; names the sample.
    """
    check_choice("advantage", name, AdvantageName)
    rewards = torch.tensor(list(step.rewards), dtype=torch.float64)
    groups = group_ids(step.groups)
    tokens = torch.tensor(list(step.num_tokens), dtype=torch.int64)
    lengths = torch.tensor(list(step.sampled), dtype=torch.int64)
    formulas: dict[AdvantageName, Callable[[], Float64[Tensor, " N"]]] = {
        **{plain: partial(formula, rewards, groups) for plain, formula in _OF_GROUPS.items()},
        "opo": lambda: opo_advantages(rewards, groups, lengths),
        "pass_at_k": lambda: pass_at_k_advantages(rewards, groups, k),
        "reinforce_pp": lambda: reinforce_pp_advantages(rewards, tokens),
        "reinforce_pp_baseline": lambda: reinforce_pp_baseline_advantages(rewards, groups, tokens),
        "reward": lambda: rewards.nan_to_num(nan=0.0),
        "none": lambda: torch.zeros_like(rewards),
    }
    return formulas[name]()


def group_advantages(
    name: AdvantageName, rewards: Sequence[float] | Tensor, groups: Sequence[Hashable] | Tensor
) -> Float64[Tensor, " N"]:
    """Return the advantages of samples by a formula that needs rewards and groups only.

    Raises:
        AlgorithmConfigError: if the formula needs more; ``step_advantages`` has it.
        RewardError: if the lengths differ, or the formula has no meaning for a reward.
    """
    check_choice("advantage", name, AdvantageName)
    if isinstance(rewards, Tensor) and rewards.dim() != 1:
        raise RewardError(
            f"advantages: rewards {tuple(rewards.shape)}; they must be [N], one for each sample: "
            ".flatten(), and as many group entries"
        )
    if name not in _OF_GROUPS:
        raise AlgorithmConfigError(
            f"advantage {name!r} needs more than rewards and groups: use step_advantages; "
            f"without it there are {', '.join(_OF_GROUPS)}"
        )
    step = StepRewards(
        rewards=[float(reward) for reward in rewards],
        groups=group_keys(groups),
        num_tokens=[1] * len(rewards),
    )
    return step_advantages(name, step)


BEFORE_WHITENING: dict[AdvantageName, AdvantageName] = {
    "reinforce_pp": "reward",
    "reinforce_pp_baseline": "dr_grpo",
}
"""What is whitened with a penalty in it, in place of rewards by themselves."""

_OF_GROUPS: dict[AdvantageName, Callable[[Tensor, Tensor], Float64[Tensor, " N"]]] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "batch_std": batch_std_advantages,
    "max_rl": max_rl_advantages,
}


def _token_whitened(
    values: Float64[Tensor, " N"], num_tokens: Int64[Tensor, " N"], eps: float
) -> Float64[Tensor, " N"]:
    """Whiten as if each value stood ``num_tokens`` times in a row."""
    kept = values.where(num_tokens > 0, 0.0)
    count = num_tokens.sum()
    mean = (kept * num_tokens).sum() / count.clamp(min=1)
    variance = ((kept - mean) ** 2 * num_tokens).sum() / (count - 1).clamp(min=1)
    return (values - mean) / (variance + eps).sqrt()


def _share_of_choices(
    bad: Float64[Tensor, " N"], total: Float64[Tensor, " N"], drawn: Float64[Tensor, " N"]
) -> Float64[Tensor, " N"]:
    """Return C(bad, drawn) / C(total, drawn) of each sample; 0 where there are too few bad."""
    shares = [
        math.comb(int(b), int(d)) / math.comb(int(n), int(d)) if 0 <= d <= b else 0.0
        for b, n, d in zip(bad.tolist(), total.tolist(), drawn.tolist(), strict=True)
    ]
    return torch.tensor(shares, dtype=torch.float64)


def _refuse(name: str, rewards: Float64[Tensor, " N"], broken: Tensor, expected: str) -> None:
    if broken.any():
        index = int(broken.nonzero()[0])
        raise RewardError(
            f"advantage {name}: sample {index} of the step has reward {rewards[index].item():g}; "
            f"rewards have to be {expected}"
        )
