"""Sums and extremes of rewards over the groups of a step, with failed samples left out."""

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from cosmos_algos.errors import RewardError, ShapeError


class GroupStatistics:
    """Statistics over the present samples of each group, each given back at every sample of it.

    Attributes:
        present: false for a failed sample, whose reward is NaN.
        rewards: the rewards, 0 for a failed sample.
        count: present samples of the sample's group.
        mean: their mean reward.
        centred: reward minus mean; 0 for a failed sample.
    """

    def __init__(self, rewards: Float[Tensor, " N"], groups: Int64[Tensor, " N"]) -> None:
        """Take the rewards of a whole step, and the number of each one's group.

        Raises:
            RewardError: if a reward is infinite.
            ShapeError: if there is not one group for each reward, or groups are no numbers from 0.
        """
        _check(rewards, groups)
        self.present: Bool[Tensor, " N"] = ~rewards.isnan()
        self.rewards: Float64[Tensor, " N"] = torch.where(self.present, rewards.double(), 0.0)
        self._groups = groups.long()
        self._num_groups = int(groups.max()) + 1 if groups.numel() else 0
        self.count = self.sum(self.present.double())
        self.mean = self.sum(self.rewards) / self.count.clamp(min=1)
        self.centred = torch.where(self.present, self.rewards - self.mean, 0.0)

    def sum(self, values: Float64[Tensor, " N"]) -> Float64[Tensor, " N"]:
        """Add ``values`` over each group."""
        sums = values.new_zeros(self._num_groups).index_add(0, self._groups, values)
        return sums[self._groups]

    @property
    def differs(self) -> Bool[Tensor, " N"]:
        """True in groups that have two different rewards.

        Equality is asked of the rewards themselves: a mean of equal numbers rounds, and a
        standard deviation of 1e-17 over a small eps is not 0.
        """
        low = self.rewards.masked_fill(~self.present, torch.inf)
        high = self.rewards.masked_fill(~self.present, -torch.inf)
        size = self._num_groups
        lowest = low.new_full((size,), torch.inf).scatter_reduce(0, self._groups, low, "amin")
        highest = high.new_full((size,), -torch.inf).scatter_reduce(0, self._groups, high, "amax")
        return (highest > lowest)[self._groups]

    def informative(self, advantages: Float64[Tensor, " N"]) -> Float64[Tensor, " N"]:
        """Set to 0 what failed and what is in a group without two different rewards."""
        return torch.where(self.differs & self.present, advantages, 0.0)


def _check(rewards: Tensor, groups: Tensor) -> None:
    are_numbers = not (groups.is_floating_point() or groups.dtype == torch.bool)
    if rewards.dim() != 1 or groups.shape != rewards.shape or not are_numbers:
        raise ShapeError(
            f"advantages: rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} of "
            f"{groups.dtype}; both must be [N], one for each sample of the step, groups in whole "
            "numbers (see group_ids)"
        )
    if groups.numel() and int(groups.min()) < 0:
        raise ShapeError(f"advantages: group {int(groups.min())}; groups count from 0")
    if bool(rewards.isinf().any()):
        index = int(rewards.isinf().nonzero()[0])
        raise RewardError(
            f"sample {index} of the step: reward {rewards[index].item()}; a reward is finite, or "
            "NaN for a sample that failed"
        )
