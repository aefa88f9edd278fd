"""Advantages of the samples of a step from their rewards, relative to their group.

One number per sample, in float64. Three rules hold for each of them: a group whose rewards are
all equal has advantage 0, a group of one has advantage 0 (its baseline is itself), and a failed
sample (reward NaN) takes no part in any statistic and has advantage 0.
"""

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from cosmos_algos.errors import AlgorithmConfigError

AdvantageName = Literal["grpo", "dr_grpo", "rloo", "batch_std"]


def group_ids(groups: Sequence[Hashable]) -> Int64[Tensor, " N"]:
    """Number groups from 0 in order of first appearance: ``["a", "b", "a"]`` is ``[0, 1, 0]``."""
    numbers: dict[Hashable, int] = {}
    ids = [numbers.setdefault(key, len(numbers)) for key in groups]
    return torch.tensor(ids, dtype=torch.int64)


def grpo_advantages(
    rewards: Float[Tensor, " N"], groups: Int64[Tensor, " N"], eps: float = 1e-6
) -> Float64[Tensor, " N"]:
    """Return A = (R - mean_g) / (std_g + eps), std with ddof 1 (GRPO, arXiv 2402.03300, eq. 3)."""
    stats = _GroupStatistics(rewards, groups)
    variance = stats.sum(stats.centred**2) / (stats.count - 1).clamp(min=1)
    return stats.informative(stats.centred / (variance.sqrt() + eps))


def dr_grpo_advantages(
    rewards: Float[Tensor, " N"], groups: Int64[Tensor, " N"]
) -> Float64[Tensor, " N"]:
    """Return A = R - mean_g, without the division that favours easy groups (arXiv 2503.20783)."""
    stats = _GroupStatistics(rewards, groups)
    return stats.informative(stats.centred)


def rloo_advantages(
    rewards: Float[Tensor, " N"], groups: Int64[Tensor, " N"]
) -> Float64[Tensor, " N"]:
    """Return A = R - mean of the others = G/(G-1) (R - mean_g) (RLOO, arXiv 2402.14740)."""
    stats = _GroupStatistics(rewards, groups)
    return stats.informative(stats.centred * stats.count / (stats.count - 1).clamp(min=1))


def batch_std_advantages(
    rewards: Float[Tensor, " N"], groups: Int64[Tensor, " N"], eps: float = 1e-6
) -> Float64[Tensor, " N"]:
    """Return A = (R - mean_g) / (std + eps), std (ddof 1) over all rewards of the step."""
    stats = _GroupStatistics(rewards, groups)
    present = stats.rewards[stats.present]
    std = present.std() if present.numel() > 1 else present.new_zeros(())
    return stats.informative(stats.centred / (std + eps))


def group_advantages(
    name: AdvantageName, rewards: Sequence[float], groups: Sequence[Hashable]
) -> Float64[Tensor, " N"]:
    """Return the advantages of a step by the name of their formula.

    Args:
        name: ``grpo``, ``dr_grpo``, ``rloo`` or ``batch_std``.
        rewards: one per sample; NaN for a failed one.
        groups: the group each sample belongs to, in any order.

    Raises:
        AlgorithmConfigError: if the lengths differ.
    """
    formulas = {
        "grpo": grpo_advantages,
        "dr_grpo": dr_grpo_advantages,
        "rloo": rloo_advantages,
        "batch_std": batch_std_advantages,
    }
    if len(rewards) != len(groups):
        raise AlgorithmConfigError(
            f"advantage {name}: {len(rewards)} rewards for {len(groups)} group entries"
        )
    return formulas[name](torch.tensor(rewards, dtype=torch.float64), group_ids(groups))


class _GroupStatistics:
    """Sums over the present samples of each group, each given back at every sample of it."""

    def __init__(self, rewards: Float[Tensor, " N"], groups: Int64[Tensor, " N"]) -> None:
        self.present: Bool[Tensor, " N"] = ~rewards.isnan()
        self.rewards = torch.where(self.present, rewards.double(), 0.0)
        self._groups = groups
        self._num_groups = int(groups.max()) + 1 if groups.numel() else 0
        self.count = self.sum(self.present.double())
        mean = self.sum(self.rewards) / self.count.clamp(min=1)
        self.centred = torch.where(self.present, self.rewards - mean, 0.0)

    def sum(self, values: Float64[Tensor, " N"]) -> Float64[Tensor, " N"]:
        """Add ``values`` over each group."""
        sums = values.new_zeros(self._num_groups).index_add(0, self._groups, values)
        return sums[self._groups]

    def informative(self, advantages: Float64[Tensor, " N"]) -> Float64[Tensor, " N"]:
        """Set to 0 what failed and what is in a group without two different rewards.

        Equality is asked of the rewards themselves: a mean of equal numbers rounds, and a
        standard deviation of 1e-17 over a small eps is not 0.
        """
        low = self.rewards.masked_fill(~self.present, torch.inf)
        high = self.rewards.masked_fill(~self.present, -torch.inf)
        size = self._num_groups
        lowest = low.new_full((size,), torch.inf).scatter_reduce(0, self._groups, low, "amin")
        highest = high.new_full((size,), -torch.inf).scatter_reduce(0, self._groups, high, "amax")
        differs = (highest > lowest)[self._groups]
        return torch.where(differs & self.present, advantages, 0.0)
