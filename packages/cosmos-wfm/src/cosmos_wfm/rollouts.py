"""Rollouts of a step, and the micro-batches that each algorithm trains on.

A step has ``groups x group size`` samples, numbered; rank r of R has the numbers r, r + R, ..., so
that the samples of one prompt are spread over ranks. Every random number of a sample comes from
(seed, step, number): ranks and micro-batches change nothing.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from cosmos_wfm.adapter import DiffusionModelAdapter, TextCondition, device_of
from cosmos_wfm.caption_data import sample_index
from cosmos_wfm.drawing import SamplerConfig, draw
from cosmos_wfm.families.shared import wan_latents
from cosmos_wfm.flow_grpo import StepBatch
from cosmos_wfm.flow_matching import per_sample
from cosmos_wfm.nft import ForwardBatch
from cosmos_wfm.sampling import NoisyStep, SdeConfig, flow_schedule
from cosmos_wfm.scoring import GuardedScorer, Scores
from cosmos_wfm.seeds import seeded_generator
from cosmos_wfm.speed import DrawingCost, peak_memory_mib, seconds_now

_Prompt = TypeVar("_Prompt")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """How the samples of a step are divided among the ranks that train on them.

    Attributes:
        num_samples: of a step, over all ranks.
        samples_per_group: of each prompt.
        micro_batch_size: of one forward pass.
        num_ranks: that train.
        prompt_seed: of the order of prompts, another one in each epoch; ``None`` for theirs.
    """

    num_samples: int
    samples_per_group: int
    micro_batch_size: int
    num_ranks: int
    prompt_seed: int | None = None

    def of_rank(self, rank: int) -> list[range]:
        """Return the numbers of each micro-batch of a rank.

        All ranks have equally many, as they call the policy together; numbers from ``num_samples``
        on are for that only and count nothing.
        """
        share = -(-self.num_samples // self.num_ranks)
        numbers = range(rank, share * self.num_ranks, self.num_ranks)
        size = self.micro_batch_size
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]

    def prompts(
        self, prompts: Sequence[_Prompt], step: int, numbers: Sequence[int]
    ) -> list[_Prompt]:
        """Return the prompt of each of these samples of a step."""
        offset = step * (self.num_samples // self.samples_per_group)
        positions = [offset + number // self.samples_per_group for number in numbers]
        if self.prompt_seed is None:
            return [prompts[position % len(prompts)] for position in positions]
        seed, num = self.prompt_seed, len(prompts)
        return [prompts[sample_index(num, position, seed)] for position in positions]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollout:
    """A micro-batch of samples.

    Attributes:
        numbers: of the samples in their step.
        prompts: of each.
        latents: x_0.
        steps: the noisy ones, if the sampler was stochastic.
        text: embedded prompts.
        negative: what guidance led away from.
        rewards: of each sample, now or later; never an exception.
        cost: what drawing them took.
    """

    numbers: Sequence[int]
    prompts: Sequence[str]
    latents: Float[Tensor, "B C *s"]
    steps: Sequence[NoisyStep]
    text: TextCondition
    negative: TextCondition | None
    rewards: Future[Scores]
    cost: DrawingCost = field(default_factory=DrawingCost)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the samples, for messages."""
        return tuple(f"sample {number} of the step" for number in self.numbers)

    def to(self, device: torch.device) -> "Rollout":
        """Return the same samples on a device."""
        negative = self.negative
        return replace(
            self,
            latents=self.latents.to(device),
            steps=[step.to(device) for step in self.steps],
            text=_moved(self.text, device),
            negative=None if negative is None else _moved(negative, device),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RolloutTask:
    """What a rank draws in one step.

    Attributes:
        adapter: the model.
        config: how.
        sde: noise of the sampler; ``None`` for the ODE.
        seed: of the run.
        step: of the run.
        reward: from pixels and prompts to rewards, which need not be there at once.
        sends_latents: ``reward`` takes latents of Wan's VAE, not normalised, instead of pixels.
    """

    adapter: DiffusionModelAdapter
    config: SamplerConfig
    sde: SdeConfig | None
    seed: int
    step: int
    reward: GuardedScorer
    sends_latents: bool = False

    @property
    def sigmas(self) -> Float[Tensor, " S"]:
        """The noise levels that are stepped through."""
        return flow_schedule(self.config.num_steps, self.config.shift or self.adapter.shift)

    @torch.no_grad()
    def run(self, policy: nn.Module, numbers: Sequence[int], prompts: Sequence[str]) -> Rollout:
        """Draw one micro-batch and have it scored; its only collectives are the policy's own.

        Args:
            policy: the denoiser that samples.
            numbers: of the samples.
            prompts: of each.
        """
        adapter, config, device = self.adapter, self.config, device_of(policy)
        begun = seconds_now(device)
        generators = [seeded_generator(self.seed, self.step, number) for number in numbers]
        samples = draw(adapter, policy, prompts, config, generators, sde=self.sde)
        media = self._media(samples.latents)
        drawn = seconds_now(device)
        rewards = self.reward(media, prompts)
        cost = DrawingCost(
            sample_s=drawn - begun,
            reward_s=seconds_now(device) - drawn,
            peak_memory_mib=peak_memory_mib(device),
        )
        return Rollout(
            numbers=numbers,
            prompts=prompts,
            latents=samples.latents,
            steps=samples.steps,
            text=samples.text,
            negative=samples.negative,
            rewards=rewards,
            cost=cost,
        )

    def _media(self, latents: Float[Tensor, "B C *s"]) -> Tensor:
        if self.sends_latents:
            return wan_latents(self.adapter, latents)
        return self.adapter.decode(latents)

    def forward_batches(
        self, rollout: Rollout, advantages: Float[Tensor, " N"], fraction: float
    ) -> list[ForwardBatch]:
        """Return the samples with fresh noise at the rollout's levels, in each sample's own order.

        Args:
            rollout: the samples.
            advantages: of all samples of the step; NaN of those that are left out.
            fraction: share of the levels that each sample is trained on.
        """
        levels, counted = self.sigmas[:-1], _counted(rollout, advantages)
        device = rollout.latents.device
        numbers = counted_numbers(rollout.numbers, ~advantages.isnan())
        generators = [seeded_generator(self.seed, self.step, number, 1) for number in numbers]
        orders = [torch.randperm(len(levels), generator=g) for g in generators]
        counts = _counts(rollout, advantages)
        latents, text = _kept(rollout.latents, counts), _kept_text(rollout.text, counts)
        batches: list[ForwardBatch] = []
        for place in range(max(1, int(len(levels) * fraction))):
            noise = [torch.randn(rollout.latents.shape[1:], generator=g) for g in generators]
            batches.append(
                ForwardBatch(
                    latents=latents,
                    noise=torch.stack(noise).to(device),
                    sigmas=torch.stack([levels[order[place]] for order in orders]).to(device),
                    text=text,
                    advantages=counted[0],
                    weights=counted[1],
                    names=rollout.names,
                )
            )
        return batches

    def step_batches(self, rollout: Rollout, advantages: Float[Tensor, " N"]) -> list[StepBatch]:
        """Return the noisy steps of the samples.

        Args:
            rollout: the samples.
            advantages: of all samples of the step; NaN of those that are left out.
        """
        ones = torch.ones(len(rollout.numbers), device=rollout.latents.device)
        own, weights = _counted(rollout, advantages)
        counts = _counts(rollout, advantages)
        text = _kept_text(rollout.text, counts)
        return [
            StepBatch(
                latents=_kept(step.latents, counts),
                following=_kept(step.following, counts),
                sigmas=step.sigma * ones,
                next_sigmas=step.next_sigma * ones,
                noise_levels=step.noise_level * ones,
                log_probs=_kept(step.log_probs, counts),
                text=text,
                negative=rollout.negative,
                guidance=self.config.scales,
                advantages=own,
                weights=weights,
                names=rollout.names,
            )
            for step in rollout.steps
        ]


def counted_numbers(numbers: Sequence[int], counts: Bool[Tensor, " N"]) -> list[int]:
    """Return whose randomness each sample is trained with: its own, if it counts.

    One that only keeps step has that of the last one that counts. So it asks no denoiser of several
    that nobody else asks, whose gradient would be 0 then, by which an optimizer moves it on.

    Args:
        numbers: of the samples.
        counts: which samples of the step do; numbers beyond them count nothing.
    """
    counted = counts.nonzero().flatten().tolist()
    last = counted[-1] if counted else len(counts) - 1
    own = {*counted}
    return [number if number in own else last for number in numbers]


def _counts(rollout: Rollout, advantages: Float[Tensor, " N"]) -> Bool[Tensor, " B"]:
    """Return which samples count: not those that are left out, nor numbers beyond the step's."""
    numbers = torch.tensor(rollout.numbers)
    own = advantages[numbers.clamp_max(len(advantages) - 1)]
    return (numbers < len(advantages)) & ~own.isnan()


def _counted(
    rollout: Rollout, advantages: Float[Tensor, " N"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Return the samples' advantages and weights."""
    numbers = torch.tensor(rollout.numbers)
    own = advantages[numbers.clamp_max(len(advantages) - 1)]
    device = rollout.latents.device
    weights = _counts(rollout, advantages).to(own.dtype)
    return own.nan_to_num(0.0).to(device), weights.to(device)


def _kept(values: Float[Tensor, "B ..."], counts: Bool[Tensor, " B"]) -> Float[Tensor, "B ..."]:
    """Return zeros for samples that count nothing: 0 times what is not finite is not 0."""
    if bool(counts.all()) or not values.is_floating_point():
        return values
    return torch.where(per_sample(counts.to(values.device), values), values, 0.0)


def _kept_text(text: TextCondition, counts: Bool[Tensor, " B"]) -> TextCondition:
    return {name: _kept(value, counts) for name, value in text.items()}


def _moved(text: TextCondition, device: torch.device) -> TextCondition:
    return {name: value.to(device) for name, value in text.items()}
