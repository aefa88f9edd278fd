"""Classifier-free guidance as pipelines apply it, with a scale of its own below a boundary."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cosmos_wfm.adapter import DiffusionModelAdapter, TextCondition
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.experts import NoiseExperts
from cosmos_wfm.families.shared import TIMESTEPS
from cosmos_wfm.flow_matching import per_sample


@dataclass(frozen=True, slots=True)
class Guidance:
    """How far is led away from the negative prompt.

    Attributes:
        scale: the pipeline's ``guidance_scale``.
        below: its ``guidance_scale_2``, at the levels of the second of two denoisers; ``None`` for
            the same as above.
    """

    scale: float
    below: float | None = None


def guided_velocity(
    adapter: DiffusionModelAdapter,
    transformer: nn.Module,
    inputs: tuple[Float[Tensor, "B C *s"], Float[Tensor, " B"]],
    text: TextCondition,
    negative: TextCondition | None,
    guidance: Guidance,
) -> Float[Tensor, "B C *s"]:
    """Return the velocity with guidance; the negative one has no gradient.

    Args:
        adapter: of the model.
        transformer: its denoiser, or another of its kind.
        inputs: x and σ.
        text: of the prompts.
        negative: of what is led away from; ``None`` for no guidance.
        guidance: how far.

    Raises:
        WfmConfigError: if there is a second scale, but one denoiser.
    """
    latents, sigmas = inputs
    positive = adapter.velocity(transformer, latents, sigmas, text)
    if negative is None:
        return positive
    with torch.no_grad():
        away = adapter.velocity(transformer, latents, sigmas, negative)
    led = adapter.guide(positive, away, guidance.scale)
    if guidance.below is None:
        return led
    experts = check_second_scale("sampler", transformer)
    led_below = adapter.guide(positive, away, guidance.below)
    is_above = per_sample(experts.asks_first(sigmas * TIMESTEPS), led)
    return torch.where(is_above, led, led_below)


def check_second_scale(subject: str, transformer: nn.Module) -> NoiseExperts:
    """Return the two denoisers that a second scale is for.

    Raises:
        WfmConfigError: if there is one denoiser; names the subject.
    """
    if not isinstance(transformer, NoiseExperts):
        raise WfmConfigError(
            f"{subject}: guidance_2 is the scale of the second of two denoisers, but this pipeline "
            "has one (no boundary_ratio); leave it out"
        )
    return transformer
