"""Rollouts of a step, and the micro-batches that each algorithm trains on.

A step has ``groups x group size`` samples, numbered; rank r of R has the numbers r, r + R, ..., so
that the samples of one prompt are spread over ranks. Every random number of a sample comes from
(seed, step, number): ranks and micro-batches change nothing.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cosmos_wfm.adapter import DiffusionModelAdapter, TextCondition, device_of
from cosmos_wfm.caption_data import sample_index
from cosmos_wfm.errors import RewardError, WfmConfigError
from cosmos_wfm.families.shared import check_pixels, wan_latents
from cosmos_wfm.flow_grpo import StepBatch
from cosmos_wfm.guidance import Guidance, check_second_scale, guided_velocity
from cosmos_wfm.nft import ForwardBatch
from cosmos_wfm.ranges import check_at_least, check_finite
from cosmos_wfm.reward_client import Scorer
from cosmos_wfm.sampling import NoisyStep, SdeConfig, flow_schedule, sample_ode, sample_sde
from cosmos_wfm.seeds import seeded_generator
from cosmos_wfm.speed import DrawingCost, peak_memory_mib, seconds_now

_Prompt = TypeVar("_Prompt")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerConfig:
    """How samples are drawn.

    Attributes:
        num_steps: of the solver.
        guidance: the pipeline's ``guidance_scale``, above 1, as pipelines do not guide at 1 and
            below; 0 for none, as DiffusionNFT is meant.
        guidance_2: its ``guidance_scale_2``, of Wan 2.2's second transformer; ``None`` for the same
            as ``guidance``.
        height: of the samples, in pixels.
        width: of the samples, in pixels.
        frames: of the samples; 1 for images.
        shift: of the levels; 0 takes the model's own.
    """

    num_steps: int = 10
    guidance: float = 0.0
    guidance_2: float | None = None
    height: int = 512
    width: int = 512
    frames: int = 1
    shift: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            WfmConfigError: names the field that is out of range, or has no effect.
        """
        check_at_least("sampler", self, num_steps=1, height=1, width=1, frames=1, shift=0)
        check_finite("sampler", self, "guidance")
        if self.guidance and self.guidance <= 1:
            raise WfmConfigError(
                f"sampler: guidance is {self.guidance}; it must be above 1, as pipelines do not "
                "guide at 1 and below, or 0 for none"
            )
        if self.guidance_2 is None:
            return
        check_at_least("sampler", self, guidance_2=0)
        if not self.guidance:
            raise WfmConfigError(
                f"sampler: guidance_2 is {self.guidance_2}, but guidance is 0, which is none at "
                "all; set both"
            )

    def check_model(self, adapter: DiffusionModelAdapter, subject: str = "sampler") -> None:
        """Refuse a size or frames that a model has no latents for, and a scale it has no use for.

        Raises:
            WfmConfigError: names the subject, and says which are right.
        """
        check_pixels(subject, (self.height, self.width), self.frames, adapter)
        if self.guidance_2 is not None:
            check_second_scale(subject, adapter.transformer)

    @property
    def scales(self) -> Guidance:
        """Both scales."""
        return Guidance(self.guidance, self.guidance_2)


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
        rewards: of each sample, now or later.
        cost: what drawing them took.
    """

    numbers: Sequence[int]
    prompts: Sequence[str]
    latents: Float[Tensor, "B C *s"]
    steps: Sequence[NoisyStep]
    text: TextCondition
    negative: TextCondition | None
    rewards: Future[list[float]]
    cost: DrawingCost = field(default_factory=DrawingCost)

    def scores(self) -> list[float]:
        """Return the rewards, once they are there.

        Raises:
            RewardError: if they are not one finite number for each sample.
            RewardServiceError: if they cannot be had.
        """
        return _checked(self.rewards.result(), self.prompts)

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
        reward: from pixels and prompts to numbers, which need not be there at once.
        sends_latents: ``reward`` takes latents of Wan's VAE, not normalised, instead of pixels.
    """

    adapter: DiffusionModelAdapter
    config: SamplerConfig
    sde: SdeConfig | None
    seed: int
    step: int
    reward: Scorer
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
        text = adapter.encode_text(prompts)
        negative = adapter.encode_negative(len(prompts)) if config.guidance else None

        def velocity(latents: Tensor, sigmas: Tensor) -> Tensor:
            inputs = (latents, sigmas)
            return guided_velocity(adapter, policy, inputs, text, negative, config.scales)

        generators = [seeded_generator(self.seed, self.step, number) for number in numbers]
        shape = adapter.latent_shape(config.frames, config.height, config.width)
        noise = torch.stack([torch.randn(shape, generator=g) for g in generators])
        noise = noise.to(device)
        steps: Sequence[NoisyStep] = ()
        if self.sde is None:
            latents = sample_ode(velocity, noise, self.sigmas)
        else:
            latents, steps = sample_sde(velocity, noise, self.sigmas, self.sde, generators)
        media = self._media(latents)
        drawn = seconds_now(device)
        rewards = _later(self.reward(media, prompts), prompts)
        cost = DrawingCost(
            sample_s=drawn - begun,
            reward_s=seconds_now(device) - drawn,
            peak_memory_mib=peak_memory_mib(device),
        )
        return Rollout(
            numbers=numbers,
            prompts=prompts,
            latents=latents,
            steps=steps,
            text=text,
            negative=negative,
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
            advantages: of all samples of the step.
            fraction: share of the levels that each sample is trained on.
        """
        levels, counted = self.sigmas[:-1], _counted(rollout, advantages)
        device = rollout.latents.device
        numbers = counted_numbers(rollout.numbers, len(advantages))
        generators = [seeded_generator(self.seed, self.step, number, 1) for number in numbers]
        orders = [torch.randperm(len(levels), generator=g) for g in generators]
        batches: list[ForwardBatch] = []
        for place in range(max(1, int(len(levels) * fraction))):
            noise = [torch.randn(rollout.latents.shape[1:], generator=g) for g in generators]
            batches.append(
                ForwardBatch(
                    latents=rollout.latents,
                    noise=torch.stack(noise).to(device),
                    sigmas=torch.stack([levels[order[place]] for order in orders]).to(device),
                    text=rollout.text,
                    advantages=counted[0],
                    weights=counted[1],
                )
            )
        return batches

    def step_batches(self, rollout: Rollout, advantages: Float[Tensor, " N"]) -> list[StepBatch]:
        """Return the noisy steps of the samples.

        Args:
            rollout: the samples.
            advantages: of all samples of the step.
        """
        ones = torch.ones(len(rollout.numbers), device=rollout.latents.device)
        own, weights = _counted(rollout, advantages)
        return [
            StepBatch(
                latents=step.latents,
                following=step.following,
                sigmas=step.sigma * ones,
                next_sigmas=step.next_sigma * ones,
                noise_levels=step.noise_level * ones,
                log_probs=step.log_probs,
                text=rollout.text,
                negative=rollout.negative,
                guidance=self.config.scales,
                advantages=own,
                weights=weights,
            )
            for step in rollout.steps
        ]


def counted_numbers(numbers: Sequence[int], total: int) -> list[int]:
    """Return whose randomness each sample is trained with: its own, if it counts.

    One that only keeps step has that of the last one that counts. So it asks no denoiser of several
    that nobody else asks, whose gradient would be 0 then, by which an optimizer moves it on.

    Args:
        numbers: of the samples.
        total: of the step; numbers from there on count nothing.
    """
    return [min(number, total - 1) for number in numbers]


def _later(
    given: "Future[list[float]] | Sequence[float]", prompts: Sequence[str]
) -> "Future[list[float]]":
    """Return what a scorer gave as what may come later."""
    if isinstance(given, Future):
        return given
    done: Future[list[float]] = Future()
    done.set_result(_checked(given, prompts))
    return done


def _checked(given: object, prompts: Sequence[str]) -> list[float]:
    try:
        scores = [float(each) for each in cast("Sequence[float]", given)]
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"rewards: a {type(given).__name__} for {len(prompts)} samples; a scorer returns a "
            f"number for each, or a Future of them ({error})"
        ) from error
    if len(scores) != len(prompts):
        raise RewardError(f"rewards: {len(scores)} numbers for {len(prompts)} samples")
    for score, prompt in zip(scores, prompts, strict=True):
        if not math.isfinite(score):
            raise RewardError(f"rewards: {score} for a sample of {prompt!r}; it must be finite")
    return scores


def _counted(
    rollout: Rollout, advantages: Float[Tensor, " N"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Return the samples' advantages and weights; numbers beyond the step's count nothing."""
    numbers = torch.tensor(rollout.numbers)
    own = advantages[numbers.clamp_max(len(advantages) - 1)]
    weights, device = (numbers < len(advantages)).to(own.dtype), rollout.latents.device
    return own.to(device), weights.to(device)


def _moved(text: TextCondition, device: torch.device) -> TextCondition:
    return {name: value.to(device) for name, value in text.items()}
