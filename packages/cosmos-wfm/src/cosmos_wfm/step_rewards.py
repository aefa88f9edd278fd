"""The rewards of a step as all ranks have them, and what becomes of samples that have none.

All ranks wait for rewards in step, and are then told the same: NaN for a sample without one on any
of them. A group with fewer than two rewards is left out whole. So samples drawn are those trained
on and those left out.
"""

import logging
import math
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cosmos_parallel import TrainingMesh
from cosmos_wfm.errors import NoRewardsError
from cosmos_wfm.rollouts import Rollout
from cosmos_wfm.scoring import NONE

_LOOK_S = 30.0
_MOST_SAID = 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepRewards:
    """Rewards of all samples of a step; groups follow each other.

    Attributes:
        values: of each; NaN of one that has none. The same on every rank.
        group_size: samples of each prompt.
        problems: why this rank's samples have none, each once.
    """

    values: Float[Tensor, " N"]
    group_size: int
    problems: Sequence[str] = ()

    @property
    def num_failed(self) -> int:
        """Samples without a reward."""
        return int(self.values.isnan().sum())

    @property
    def trained(self) -> Bool[Tensor, " N"]:
        """Which samples are trained on: those with a reward that are not alone in their group."""
        present = ~self.values.isnan()
        several = present.view(-1, self.group_size).sum(1, keepdim=True) > 1
        return (present.view(-1, self.group_size) & several).flatten()

    def figures(self) -> dict[str, float]:
        """Return what the step earned, and how many samples were trained on and were not.

        Without two rewards there is no ``reward_std``, without one no ``reward``, and without a
        group that is trained on no ``groups_without_signal``.
        """
        trained = self.trained
        present = self.values[~self.values.isnan()]
        figures: dict[str, float] = {}
        if len(present):
            figures["reward"] = present.mean().item()
        if len(present) > 1:
            figures["reward_std"] = present.std().item()
        groups = self.values.view(-1, self.group_size)[trained.view(-1, self.group_size).any(1)]
        if len(groups):
            high = groups.nan_to_num(nan=-torch.inf).amax(1)
            flat = high == groups.nan_to_num(nan=torch.inf).amin(1)
            figures["groups_without_signal"] = flat.double().mean().item()
        num_trained = int(trained.sum())
        return {
            **figures,
            "samples_trained": float(num_trained),
            "samples_left_out": float(len(trained) - num_trained),
            "rewards_failed": float(self.num_failed),
        }


def rewards_of_all(
    rollouts: Sequence[Rollout], mesh: TrainingMesh, *, num_samples: int, group_size: int
) -> StepRewards:
    """Wait for the rewards of this rank's samples, and return those of all; every rank calls.

    Args:
        rollouts: of this rank.
        mesh: the ranks.
        num_samples: of the step; numbers from there on count nothing.
        group_size: samples of each prompt.
    """
    _wait_in_step(rollouts, mesh)
    sums = torch.zeros(num_samples, dtype=torch.float64, device=mesh.process.device)
    failed = torch.zeros_like(sums)
    problems: dict[str, None] = {}
    for rollout in rollouts:
        scores = rollout.rewards.result(0.0)
        for number, value in zip(rollout.numbers, scores.values, strict=True):
            if number < num_samples:
                has_none = math.isnan(value)
                failed[number] = float(has_none)
                sums[number] = 0.0 if has_none else value
        problems |= dict.fromkeys(scores.problems)
    values = mesh.sum_over_data(sums)
    values[mesh.max_(failed) > 0] = NONE
    return StepRewards(values=values.cpu(), group_size=group_size, problems=tuple(problems))


def _wait_in_step(rollouts: Sequence[Rollout], mesh: TrainingMesh) -> None:
    """Wait for rewards; ranks look at each other meanwhile, as a collective has a time limit."""
    pending = {rollout.rewards for rollout in rollouts}
    while True:
        pending = wait(pending, timeout=_LOOK_S).not_done
        if not mesh.max_(torch.tensor(len(pending), device=mesh.process.device)):
            return


class RewardWatch:
    """Says which samples of a step have no reward, and ends a run that has none for too long."""

    def __init__(self, most: int, rank: int) -> None:
        """Begin with none that failed.

        Args:
            most: steps in a row without a single reward; with that many the run ends.
            rank: of this process.
        """
        self._most = most
        self._rank = rank
        self._in_a_row = 0

    def look(self, step: int, rewards: StepRewards) -> None:
        """Look at the rewards of a step; every rank calls, and raises if one does.

        Args:
            step: counted from 1.
            rewards: of all samples.

        Raises:
            NoRewardsError: if no sample of this step and those before it has a reward.
        """
        num = rewards.num_failed
        self._in_a_row = self._in_a_row + 1 if num == len(rewards.values) else 0
        said = _said(rewards.problems)
        if self._in_a_row >= self._most:
            raise NoRewardsError(
                f"rewards: no sample of {self._steps(step)} has one: {said or 'see other ranks'}; "
                "mend what rewards them, and go on with --resume"
            )
        if num and (rewards.problems or self._rank == 0):
            logging.getLogger(__name__).warning(
                "step %d: %d of %d samples have no reward%s",
                step,
                num,
                len(rewards.values),
                f": {said}" if said else ", which other ranks say more of",
            )

    def _steps(self, step: int) -> str:
        first = step - self._in_a_row + 1
        return f"step {step}" if first == step else f"steps {first} to {step}"


def _said(problems: Sequence[str]) -> str:
    more = len(problems) - _MOST_SAID
    parts = [*problems[:_MOST_SAID], *([f"and {more} more"] if more > 0 else [])]
    return "; ".join(parts)
