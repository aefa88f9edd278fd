"""Drawing samples: how they are drawn, and what training takes of them.

prompts, noise of each sample's own generator ─► solver ─► latents, noisy steps ─► ForwardBatch
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cosmos_wfm.adapter import DiffusionModelAdapter, TextCondition, device_of
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.families.shared import check_pixels
from cosmos_wfm.guidance import Guidance, check_second_scale, guided_velocity
from cosmos_wfm.nft import ForwardBatch
from cosmos_wfm.ranges import check_at_least, check_finite
from cosmos_wfm.sampling import NoisyStep, SdeConfig, flow_schedule, sample_ode, sample_sde
from cosmos_wfm.seeds import seeded_generator


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrawnSamples:
    """Samples as a solver left them.

    Attributes:
        latents: x_0.
        sigmas: the noise levels that were stepped through, the last one 0.
        steps: the noisy ones, if the solver was stochastic.
        text: embedded prompts.
        negative: what guidance led away from.
    """

    latents: Float[Tensor, "B C *s"]
    sigmas: Float[Tensor, " S"]
    steps: Sequence[NoisyStep]
    text: TextCondition
    negative: TextCondition | None

    def forward_batch(self, advantages: Float[Tensor, " B"], *, seed: int) -> ForwardBatch:
        """Return the samples noised anew, each to one of the levels that it was drawn through.

        Args:
            advantages: of each sample.
            seed: of levels and noise.
        """
        num, device = len(self.latents), self.latents.device
        generators = [seeded_generator(seed, number, 1) for number in range(num)]
        levels = self.sigmas[:-1]
        places = [int(torch.randint(len(levels), (1,), generator=g)) for g in generators]
        noise = [torch.randn(self.latents.shape[1:], generator=g) for g in generators]
        return ForwardBatch(
            latents=self.latents,
            noise=torch.stack(noise).to(device),
            sigmas=levels[places].to(device),
            text=self.text,
            advantages=advantages.to(device),
            weights=torch.ones(num, device=device),
        )


def draw_latents(
    adapter: DiffusionModelAdapter,
    policy: nn.Module,
    prompts: Sequence[str],
    sampler: SamplerConfig,
    *,
    seed: int,
) -> DrawnSamples:
    """Draw a sample for each prompt, by the ODE.

    Args:
        adapter: the model.
        policy: its denoiser, or another one of its kind.
        prompts: of each sample.
        sampler: how.
        seed: of the noise, with a sample's place among the prompts.

    Raises:
        WfmConfigError: if the model has no latents of that size.
    """
    sampler.check_model(adapter)
    generators = [seeded_generator(seed, number) for number in range(len(prompts))]
    return draw(adapter, policy, prompts, sampler, generators)


@torch.no_grad()
def draw(
    adapter: DiffusionModelAdapter,
    policy: nn.Module,
    prompts: Sequence[str],
    sampler: SamplerConfig,
    generators: Sequence[torch.Generator],
    *,
    sde: SdeConfig | None = None,
) -> DrawnSamples:
    """Draw a sample for each prompt; the only collectives are the policy's own.

    Args:
        adapter: the model.
        policy: the denoiser that samples.
        prompts: of each sample.
        sampler: how.
        generators: of each sample's noise.
        sde: noise of the solver; ``None`` for the ODE.
    """
    text = adapter.encode_text(prompts)
    negative = adapter.encode_negative(len(prompts)) if sampler.guidance else None

    def velocity(latents: Tensor, levels: Tensor) -> Tensor:
        inputs = (latents, levels)
        return guided_velocity(adapter, policy, inputs, text, negative, sampler.scales)

    shape = adapter.latent_shape(sampler.frames, sampler.height, sampler.width)
    noise = torch.stack([torch.randn(shape, generator=each) for each in generators])
    noise = noise.to(device_of(policy))
    sigmas = flow_schedule(sampler.num_steps, sampler.shift or adapter.shift)
    steps: Sequence[NoisyStep] = ()
    if sde is None:
        latents = sample_ode(velocity, noise, sigmas)
    else:
        latents, steps = sample_sde(velocity, noise, sigmas, sde, generators)
    return DrawnSamples(latents=latents, sigmas=sigmas, steps=steps, text=text, negative=negative)
