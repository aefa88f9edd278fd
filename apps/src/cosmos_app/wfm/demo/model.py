"""A tiny Stable Diffusion 3 whose autoencoder has seen the shapes; its denoiser knows nothing."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from cosmos_wfm import ImageCaptions, save_pipeline, tiny_sd3_pipeline

_LAYERS = 3
_WIDTH = 64
_PROMPT_TOKENS = 24
_RATE = 4e-3
_NOISE = 0.05
"""Of latents in training, so that their neighbours decode to the same picture."""


def build_model(
    directory: Path, data: ImageCaptions, *, num_steps: int, batch_size: int, seed: int
) -> float:
    """Write a pipeline directory and return how far its pictures are from those it was given.

    Args:
        directory: where to.
        data: pictures for the autoencoder.
        num_steps: of its training.
        batch_size: of a step.
        seed: of weights and batches.

    Returns:
        The mean absolute difference of the last batch, of pixels in [-1, 1].
    """
    pipeline = tiny_sd3_pipeline(seed=seed, num_layers=_LAYERS, width=_WIDTH)
    shorten_prompts(pipeline)
    vae: nn.Module = pipeline.vae
    pictures = torch.stack([data[index].pixels for index in range(len(data))])
    generator = torch.Generator().manual_seed(seed)
    vae.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=num_steps)
    error = torch.zeros(())
    for _ in range(num_steps):
        chosen = torch.randint(len(pictures), (batch_size,), generator=generator)
        latents = pipeline.vae.encode(pictures[chosen]).latent_dist.mode()
        noisy = latents + _NOISE * torch.randn(latents.shape, generator=generator)
        difference = pipeline.vae.decode(noisy).sample - pictures[chosen]
        error = difference.detach().abs().mean()
        # Latents of spread 1: the denoiser starts from noise of that spread.
        loss = difference.square().mean() + 0.01 * (latents.std() - 1.0).square()
        loss = loss + 0.01 * latents.mean().square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    vae.eval()
    with torch.no_grad():
        latents = pipeline.vae.encode(pictures).latent_dist.mode()
    pipeline.vae.register_to_config(
        shift_factor=float(latents.mean()), scaling_factor=1.0 / float(latents.std())
    )
    save_pipeline(pipeline, directory)
    return float(error)


def shorten_prompts(pipeline: Any) -> None:
    """Leave out most of the padding: 48 text tokens beside 16 of the picture, not 333."""
    for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_2, pipeline.tokenizer_3):
        tokenizer.model_max_length = _PROMPT_TOKENS
    pipeline.tokenizer_max_length = _PROMPT_TOKENS
