"""An algorithm, put together: samples of a step to micro-batches, micro-batches to losses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from cosmos_algos.advantages import AdvantageName, group_advantages
from cosmos_algos.aggregation import AggregationConfig, SampleWeights, sample_weights
from cosmos_algos.batch import TokenBatch, collate
from cosmos_algos.logprobs import TokenScores
from cosmos_algos.loss_sum import LossSum
from cosmos_algos.scoring import model_scores
from cosmos_algos.splitting import split_batches, split_ranks
from cosmos_algos.surrogate import ObjectiveConfig, policy_objective
from cosmos_core.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Which part of a step a rank trains on, and in what portions.

    Attributes:
        max_tokens: padded tokens of a micro-batch.
        rank: position among the ranks that share the step.
        num_ranks: how many they are, over all replicas.
        pad_id: token id of the padding.
    """

    max_tokens: int
    rank: int = 0
    num_ranks: int = 1
    pad_id: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """What the configs build; see ``GrpoConfig`` for the fields."""

    advantage: AdvantageName
    objective: ObjectiveConfig
    aggregation: AggregationConfig
    temperature: float
    logprob_chunk: int

    def batches(
        self, trajectories: Sequence[Trajectory], share: Share, *, policy_version: int
    ) -> list[TokenBatch]:
        """Return this rank's micro-batches of a step.

        Every rank calls it with the *whole* step in the same order; advantages and weights come
        from all of it, so that no split changes the loss.

        Args:
            trajectories: all samples of the step; a failed sample has no trajectory.
            share: the part this rank takes.
            policy_version: weight version the trainer holds now.

        Raises:
            TrajectoryError: if a sample cannot be trained on.
        """
        groups = [trajectory.group for trajectory in trajectories]
        advantages = group_advantages(self.advantage, [t.reward for t in trajectories], groups)
        trained = [trajectory.num_trainable for trajectory in trajectories]
        weights = sample_weights(trained, groups, self.aggregation)
        lengths = [trajectory.num_tokens for trajectory in trajectories]
        mine = split_ranks(lengths, share.num_ranks)[share.rank]
        batches: list[TokenBatch] = []
        for rows in split_batches([lengths[index] for index in mine], share.max_tokens):
            chosen = torch.tensor([mine[row] for row in rows])
            batches.append(
                collate(
                    [trajectories[index] for index in chosen.tolist()],
                    advantages[chosen],
                    SampleWeights(weights.token[chosen], weights.denominator[chosen]),
                    pad_id=share.pad_id,
                    policy_version=policy_version,
                )
            )
        return batches

    def scores(self, model: nn.Module, batch: TokenBatch) -> TokenScores:
        """Score a batch's targets under a model at the sampling temperature."""
        return model_scores(model, batch, temperature=self.temperature, chunk=self.logprob_chunk)

    @torch.no_grad()
    def with_reference(self, reference: nn.Module, batch: TokenBatch) -> TokenBatch:
        """Return the batch with the reference policy's log-probabilities."""
        return replace(batch, reference_logprobs=self.scores(reference, batch).logprobs)

    @torch.no_grad()
    def with_old(self, model: nn.Module, batch: TokenBatch) -> TokenBatch:
        """Return the batch with the log-probabilities of the policy as it is now.

        Needed where several optimizer steps are taken on one step's samples; with one, the
        current policy is the old one.
        """
        return replace(batch, old_logprobs=self.scores(model, batch).logprobs)

    def loss(self, model: nn.Module, batch: TokenBatch) -> LossSum:
        """Run the model once over a batch and return the batch's part of the step's loss."""
        return policy_objective(self.scores(model, batch), batch, self.objective)
