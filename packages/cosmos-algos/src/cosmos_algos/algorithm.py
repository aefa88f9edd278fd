"""An algorithm, put together: samples of a step to micro-batches, micro-batches to losses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from cosmos_algos.advantages import (
    BEFORE_WHITENING,
    AdvantageName,
    StepRewards,
    step_advantages,
)
from cosmos_algos.aggregation import (
    AggregationConfig,
    SampleWeights,
    imitation_weights,
    sample_weights,
)
from cosmos_algos.arguments import check_coefficients
from cosmos_algos.batch import ScoreField, TokenBatch, collate
from cosmos_algos.distillation import top_k_jsd
from cosmos_algos.divergence import KlConfig, kl_reward, kl_values
from cosmos_algos.errors import AlgorithmConfigError, EmptyStepError
from cosmos_algos.likeliest import LikeliestConfig
from cosmos_algos.logprobs import TokenScores
from cosmos_algos.loss_sum import LossSum
from cosmos_algos.objective import ObjectiveConfig, policy_objective
from cosmos_algos.policy_recipe import PolicyRecipe
from cosmos_algos.scoring import (
    model_scores,
    scores_and_candidates,
    scores_and_likeliest,
    scores_and_values,
)
from cosmos_algos.splitting import Share, split_batches, split_ranks
from cosmos_algos.surrogate import GspoClip
from cosmos_algos.values import CriticConfig, critic_objective, with_gae
from cosmos_core.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """What the configs build; see ``GrpoConfig`` for the fields.

    Attributes:
        advantage: formula of the advantages.
        objective: what a token's loss is made of.
        aggregation: which mean over tokens.
        temperature: that of the sampler.
        logprob_chunk: targets projected onto the vocabulary at a time.
        k: of advantage ``pass_at_k``.
        imitation_coefficient: weight of the negative log-likelihood of samples with a positive
            reward; 0 for none.
        critic: how a value head of the model is used and trained; ``None`` for no critic.
        epochs: optimizer steps over the samples of each step.
        likeliest: a divergence from the teacher's likeliest tokens in the loss; ``None`` for none.
        whiten_returns: whiten rewards with the KL penalty in them, token by token over the step
            (REINFORCE++), where the advantage alone whitens rewards without it.
    """

    advantage: AdvantageName
    objective: ObjectiveConfig
    aggregation: AggregationConfig
    temperature: float
    logprob_chunk: int
    k: int = 1
    imitation_coefficient: float = 0.0
    critic: CriticConfig | None = None
    epochs: int = 1
    likeliest: LikeliestConfig | None = None
    whiten_returns: bool = False

    def __post_init__(self) -> None:
        """Refuse what is out of range, and a mean that weighs GSPO's samples by their length."""
        if self.epochs < 1:
            raise AlgorithmConfigError(f"epochs is {self.epochs}; it must be 1 or more")
        check_coefficients("ppo", {"imitation_coefficient": self.imitation_coefficient})
        if not 0.0 < self.temperature < math.inf or self.logprob_chunk < 0:
            raise AlgorithmConfigError(
                f"temperature is {self.temperature}, logprob_chunk {self.logprob_chunk}; the one "
                "divides logits and must be above 0 and finite, the other must be 0 or more"
            )
        kl = self.objective.kl
        if self.critic and kl.coefficient and kl.place == "reward" and kl.estimator != "k1":
            raise AlgorithmConfigError(
                f"ppo: a critic does not give back the gradient of kl.estimator {kl.estimator!r} "
                "in the reward: use 'k1', or kl.place = 'loss'"
            )
        if self.whiten_returns and (kl.place, kl.estimator) != ("reward", "k1"):
            raise AlgorithmConfigError(
                f"reinforce_pp: whitening does not reach the gradient of {kl.estimator!r} in the "
                f"{kl.place}: use kl.estimator = 'k1' in the reward, or kl.place = 'loss'"
            )
        if self.whiten_returns and self.advantage not in BEFORE_WHITENING:
            raise AlgorithmConfigError(
                f"advantage {self.advantage!r} is not one that is whitened over the step; those "
                f"are {', '.join(BEFORE_WHITENING)}"
            )
        mode = self.aggregation.mode
        if isinstance(self.objective.surrogate, GspoClip) and mode != "sequence_mean":
            raise AlgorithmConfigError(
                f"gspo: aggregation {mode!r} weighs samples by their length; "
                "a loss of whole samples needs 'sequence_mean'"
            )

    @property
    def needs(self) -> frozenset[ScoreField]:
        """What the loss reads of a batch beyond what a rollout records."""
        wanted: dict[ScoreField, bool] = {
            "reference_logprobs": self.objective.kl.coefficient > 0.0,
            "teacher_logprobs": self.objective.teacher_coefficient != 0.0
            or self.likeliest is not None,
            "values": self.critic is not None,
        }
        return frozenset(field for field, needed in wanted.items() if needed)

    @property
    def scores_first(self) -> bool:
        """Whether ``with_token_advantages`` sees all batches of a step before its first update."""
        return self.critic is not None or self.whiten_returns

    @property
    def whitens(self) -> bool:
        """Whether advantages of tokens are whitened by the moments of the whole step."""
        return self.whiten_returns if self.critic is None else self.critic.whiten

    def step_targets(self, step: StepRewards) -> tuple[Float64[Tensor, " N"], SampleWeights]:
        """Return the advantage and the weights of every sample of a step.

        Args:
            step: *all* samples of the step, on every rank.

        Raises:
            EmptyStepError: if there are no samples.
            RewardError: if a reward has no meaning for the advantage; names the sample.
        """
        if not step.rewards:
            raise EmptyStepError(
                "the step has no samples: give every rank all of them, and leave out a step of "
                "which all failed"
            )
        name = BEFORE_WHITENING[self.advantage] if self.whiten_returns else self.advantage
        advantages = step_advantages(name, step, k=self.k)
        weights = sample_weights(step.num_tokens, step.groups, self.aggregation)
        if self.imitation_coefficient:
            weights = imitation_weights(
                step.num_tokens, step.rewards, weights, self.imitation_coefficient
            )
        return advantages, weights

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
            EmptyStepError: on every rank, if there are no samples, or none has a trained token.
        """
        step = StepRewards(
            rewards=[trajectory.reward for trajectory in trajectories],
            groups=[trajectory.group for trajectory in trajectories],
            num_tokens=[trajectory.num_trainable for trajectory in trajectories],
        )
        if trajectories and not any(step.num_tokens):
            raise EmptyStepError(
                f"the step has {len(trajectories)} samples, the first of group "
                f"{trajectories[0].group}, and none of them has a trained token"
            )
        advantages, weights = self.step_targets(step)
        lengths = [trajectory.num_tokens for trajectory in trajectories]
        mine = split_ranks(lengths, share.num_ranks)[share.rank]
        batches: list[TokenBatch] = []
        for rows in split_batches([lengths[index] for index in mine], share.max_tokens):
            chosen = [mine[row] for row in rows]
            batches.append(
                collate(
                    [trajectories[index] for index in chosen],
                    advantages[chosen],
                    weights.select(chosen),
                    pad_id=share.pad_id,
                    policy_version=policy_version,
                    vocab_size=share.vocab_size,
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
    def with_teacher(self, teacher: nn.Module, batch: TokenBatch) -> TokenBatch:
        """Return the batch with a teacher's log-probabilities, and likeliest tokens if wanted."""
        if self.likeliest is not None:
            scores, top = scores_and_likeliest(
                teacher,
                batch,
                self.likeliest.top_k,
                temperature=self.temperature,
                chunk=self.logprob_chunk,
            )
            return replace(
                batch,
                teacher_logprobs=scores.logprobs,
                teacher_top_logprobs=top.logprobs,
                teacher_top_token_ids=top.token_ids,
            )
        return replace(batch, teacher_logprobs=self.scores(teacher, batch).logprobs)

    @torch.no_grad()
    def with_old(self, model: nn.Module, batch: TokenBatch) -> TokenBatch:
        """Return the batch with the log-probabilities of the policy as it is now.

        Needed where several optimizer steps are taken on one step's samples; with one, the
        current policy is the old one.
        """
        return replace(batch, old_logprobs=self.scores(model, batch).logprobs)

    @torch.no_grad()
    def with_critic(self, model: nn.Module, batch: TokenBatch) -> TokenBatch:
        """Return the batch with old log-probabilities and values, and advantages made of these.

        Advantages are not whitened: that takes the moments of the whole step.

        Args:
            model: the policy at the start of the step, with a value head.
            batch: with the reference's log-probabilities, if the reward is penalised by them.

        Raises:
            AlgorithmConfigError: if the algorithm has no critic.
            MissingScoresError: if the batch lacks what a penalty needs.
        """
        if self.critic is None:
            raise AlgorithmConfigError("this algorithm has no critic")
        scores, values = scores_and_values(
            model, batch, temperature=self.temperature, chunk=self.logprob_chunk
        )
        kept = values.where(batch.trainable, 0.0)
        valued = replace(batch, old_logprobs=scores.logprobs, values=kept)
        divergence = self._divergence_in_reward(scores.logprobs, batch)
        penalties = None if divergence is None else self.objective.kl.coefficient * divergence
        return with_gae(valued, self.critic.gae, penalties)

    @torch.no_grad()
    def with_returns(self, model: nn.Module, batch: TokenBatch) -> TokenBatch:
        """Return the batch with A_t = R - β Σ_{s≥t} γ^(s-t) k1_s, k1 = log π_old - log π_ref.

        REINFORCE++ (arXiv 2501.03262) before its whitening, which takes the moments of the whole
        step. R is the batch's advantage: the reward, or with a baseline the reward less the mean
        of its group.

        Args:
            model: the policy at the start of the step, π_old.
            batch: with the reference's log-probabilities.

        Raises:
            MissingScoresError: if the batch has none of the reference.
        """
        logprobs = self.scores(model, batch).logprobs
        reference = batch.scores_of("reference_logprobs", "kl.coefficient over 0")
        penalties = kl_reward(logprobs, reference, batch.samples, self.objective.kl)
        advantages = (batch.advantages + penalties).where(batch.trainable, 0.0)
        return replace(batch, old_logprobs=logprobs, advantages=advantages)

    def with_token_advantages(self, model: nn.Module, batch: TokenBatch) -> TokenBatch:
        """Return the batch as ``with_critic`` or ``with_returns`` does; see ``scores_first``."""
        return (
            self.with_returns(model, batch)
            if self.critic is None
            else self.with_critic(model, batch)
        )

    def loss(self, model: nn.Module, batch: TokenBatch) -> LossSum:
        """Run the model once over a batch and return the batch's part of the step's loss.

        With a critic its loss is added (PPO, arXiv 1707.06347, eq. 9).

        Raises:
            MissingScoresError: if the batch lacks what the algorithm needs.
        """
        if self.likeliest is not None:
            return self._distilling_loss(model, batch, self.likeliest)
        if self.critic is None:
            return self._policy_loss(self.scores(model, batch), batch)
        scores, values = scores_and_values(
            model, batch, temperature=self.temperature, chunk=self.logprob_chunk
        )
        policy = self._policy_loss(scores, batch)
        returns = batch.scores_of("returns", "the value loss")
        critic = critic_objective(values, batch, returns, self.critic)
        sums = {f"critic/{name}": v for name, v in critic.metrics.items() if name != "tokens"}
        return replace(
            policy,
            total=policy.total + self.critic.coefficient * critic.total,
            metrics={**policy.metrics, **sums},
        )

    def _policy_loss(self, scores: TokenScores, batch: TokenBatch) -> LossSum:
        """Return the policy's loss; a penalty that is in its advantages is told, not added."""
        if not self.scores_first or self.objective.kl.place != "reward":
            return policy_objective(scores, batch, self.objective)
        if self.whiten_returns:
            batch.scores_of("old_logprobs", "whitening of rewards with their penalty")
        policy = policy_objective(scores, batch, replace(self.objective, kl=KlConfig()))
        divergence = self._divergence_in_reward(scores.logprobs.detach(), batch)
        if divergence is None:
            return policy
        told = {"kl": (divergence * batch.trainable).sum()}
        return replace(policy, metrics={**policy.metrics, **told})

    def _distilling_loss(
        self, model: nn.Module, batch: TokenBatch, likeliest: LikeliestConfig
    ) -> LossSum:
        """Add the divergence from what the teacher finds likeliest (GKD, arXiv 2306.13649)."""
        teacher = likeliest.of_batch(batch)
        scores, mine = scores_and_candidates(
            model,
            batch,
            teacher.token_ids,
            temperature=self.temperature,
            chunk=self.logprob_chunk,
        )
        rows = batch.trainable
        divergence = torch.zeros_like(scores.logprobs).masked_scatter(
            rows, top_k_jsd(teacher.logprobs[rows], mine[rows], likeliest.beta)
        )
        policy = policy_objective(scores, batch, self.objective, likeliest.coefficient * divergence)
        metrics = {**policy.metrics, "divergence": divergence.detach().sum()}
        return replace(policy, metrics=metrics)

    def _divergence_in_reward(
        self, logprobs: Float[Tensor, "B T"], batch: TokenBatch
    ) -> Float[Tensor, "B T"] | None:
        """Return the estimate that a critic's rewards are penalised by; ``None`` if they are not.

        Raises:
            MissingScoresError: if the batch has none of the reference.
        """
        kl = self.objective.kl
        if not kl.coefficient or kl.place != "reward":
            return None
        reference = batch.scores_of("reference_logprobs", "kl.coefficient over 0")
        return kl_values(logprobs, reference, kl.estimator)


def policy_algorithm(
    recipe: PolicyRecipe,
    *,
    k: int = 1,
    imitation_coefficient: float = 0.0,
    likeliest: LikeliestConfig | None = None,
) -> Algorithm:
    """Make the algorithm of a recipe."""
    return Algorithm(
        advantage=recipe.advantage,
        objective=recipe.objective,
        aggregation=recipe.aggregation,
        temperature=recipe.temperature,
        logprob_chunk=recipe.logprob_chunk,
        k=k,
        imitation_coefficient=imitation_coefficient,
        likeliest=likeliest,
    )
