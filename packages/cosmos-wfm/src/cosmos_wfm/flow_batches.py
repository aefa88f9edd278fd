"""From captioned samples to batches of flow matching, with all randomness drawn from seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cosmos_wfm.adapter import DiffusionModelAdapter, TextCondition
from cosmos_wfm.captions import CaptionedImage
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


def noised_batch(
    adapter: DiffusionModelAdapter,
    samples: Sequence[CaptionedImage],
    generators: Sequence[torch.Generator],
    config: NoisingConfig,
) -> FlowBatch:
    """Encode samples and draw their levels, noise, dropout and given frames.

    Args:
        adapter: the model.
        samples: pixels of one size, and prompts.
        generators: one for each sample, the only source of its randomness.
        config: how.
    """
    latents = adapter.encode_pixels(torch.stack([sample.pixels for sample in samples]))
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
        text=_text(adapter, [sample.prompt for sample in samples], dropped),
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


def sample_index(num_samples: int, position: int, seed: int) -> int:
    """Return the sample at a position of the endless stream: each epoch is a new permutation."""
    epoch, place = divmod(position, num_samples)
    order = np.random.default_rng((seed, epoch)).permutation(num_samples)
    return int(order[place])


def seeded_generator(*parts: int) -> torch.Generator:
    """Return a generator that is a function of these numbers."""
    mixed = np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed >> 1))


def _text(
    adapter: DiffusionModelAdapter, prompts: Sequence[str], dropped: Sequence[bool]
) -> TextCondition:
    """Embed prompts, those dropped as the model drops them."""
    text = adapter.encode_text(prompts)
    if not any(dropped):
        return text
    empty, chosen = adapter.encode_dropped(len(prompts)), torch.tensor(dropped)
    return {
        name: torch.where(per_sample(chosen, values).to(values.device), empty[name], values)
        for name, values in text.items()
    }
