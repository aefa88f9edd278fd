"""From captioned samples to batches of flow matching, with all randomness drawn from seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from cosmos_wfm.adapter import DiffusionModelAdapter, TextCondition
from cosmos_wfm.encoding import EncodedSample
from cosmos_wfm.flow_matching import FlowBatch, FlowMatchingConfig, draw_sigmas, per_sample


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisingConfig:
    """How samples are noised.

    Attributes:
        flow: density of the noise levels.
        caption_dropout: share of samples trained without prompt, for guidance.
        max_given_frames: most latent frames that are given as condition, where the model takes any;
            each sample has a number from 0 to this, evenly drawn.
    """

    flow: FlowMatchingConfig = field(default_factory=FlowMatchingConfig)
    caption_dropout: float = 0.1
    max_given_frames: int = 2


def noise_encoded(
    adapter: DiffusionModelAdapter,
    samples: Sequence[EncodedSample],
    generators: Sequence[torch.Generator],
    config: NoisingConfig,
    dropped_text: Callable[[], TextCondition],
) -> FlowBatch:
    """Draw levels, noise, dropout and given frames of samples that are encoded already.

    Args:
        adapter: the model.
        samples: latents of one size, and embedded prompts.
        generators: one for each sample, the only source of its randomness.
        config: how.
        dropped_text: returns the one row that stands for a dropped prompt.
    """
    latents = torch.stack([sample.latents for sample in samples])
    noise, sigmas = torch.empty_like(latents), latents.new_empty(len(samples))
    dropped: list[bool] = []
    given: list[int] = []
    most = min(config.max_given_frames, adapter.max_given_frames)
    for row, generator in enumerate(generators):
        dropped.append(torch.rand((), generator=generator).item() < config.caption_dropout)
        sigmas[row] = draw_sigmas(config.flow, adapter.shift, 1, generator)[0]
        noise[row] = torch.randn(latents.shape[1:], generator=generator)
        if most:
            given.append(int(torch.randint(most + 1, (), generator=generator)))
    return FlowBatch(
        latents=latents,
        noise=noise,
        sigmas=sigmas,
        text=_text(samples, dropped, dropped_text),
        weights=torch.ones_like(sigmas),
        given=given_mask(given, latents) if any(given) else None,
    )


def given_mask(
    counts: Sequence[int], latents: Float[Tensor, "B C f h w"]
) -> Float[Tensor, "B 1 f 1 1"]:
    """Return 1 in the first frames of each sample; one frame at least is left to be made."""
    frames = torch.arange(latents.shape[2])
    first = torch.tensor(counts).clamp_max(latents.shape[2] - 1)
    mask = (frames < first[:, None]).to(latents)
    return mask[:, None, :, None, None]


def _text(
    samples: Sequence[EncodedSample],
    dropped: Sequence[bool],
    dropped_text: Callable[[], TextCondition],
) -> TextCondition:
    """Return the samples' embedded prompts, with another row where they are dropped."""
    text = {
        name: torch.stack([sample.text[name] for sample in samples]) for name in samples[0].text
    }
    if not any(dropped):
        return text
    empty, chosen = dropped_text(), torch.tensor(dropped)
    return {
        name: torch.where(per_sample(chosen, values).to(values.device), empty[name], values)
        for name, values in text.items()
    }
