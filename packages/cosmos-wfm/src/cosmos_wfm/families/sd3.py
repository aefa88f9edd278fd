"""Stable Diffusion 3 and 3.5 through diffusers' ``StableDiffusion3Pipeline``."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cosmos_wfm.adapter import TextCondition
from cosmos_wfm.families.shared import (
    TIMESTEPS,
    call_denoiser,
    interpolated,
    no_given_frames,
    own_schedule,
    token_counts,
)


class Sd3Adapter:
    """Adapter for ``StableDiffusion3Pipeline``; see ``DiffusionModelAdapter`` for the methods.

    Latents are (z - shift) · scale with the VAE's own constants. Text is CLIP-L, CLIP-G and T5 as
    the pipeline lays them out; the transformer takes no text mask and a float timestep 1000 σ.
    """

    denoiser = "transformer"
    unsaved: Sequence[str] = ()
    temporal_factor = 0
    max_given_frames = 0
    lora_targets: Sequence[str] = (
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "attn.to_k",
        "attn.to_out.0",
        "attn.to_q",
        "attn.to_v",
    )

    def __init__(self, pipeline: Any, *, max_prompt_tokens: int = 256) -> None:
        """Adapt a pipeline.

        Args:
            pipeline: a ``StableDiffusion3Pipeline`` (diffusers has no usable type for it).
            max_prompt_tokens: T5 tokens of a prompt, if its tokenizer takes as many; CLIP takes
                its first 77 anyway.
        """
        self.pipeline = pipeline
        tokenizer = pipeline.tokenizer_3
        own = max_prompt_tokens if tokenizer is None else int(tokenizer.model_max_length)
        self._max_prompt_tokens = min(max_prompt_tokens, own)

    @property
    def transformer(self) -> nn.Module:
        """The SD3 transformer."""
        return self.pipeline.transformer

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The joint transformer blocks."""
        return list(self.pipeline.transformer.transformer_blocks)

    @property
    def shift(self) -> float:
        """3.0 in the released models."""
        return float(self.pipeline.scheduler.config.shift)

    @property
    def size_multiple(self) -> int:
        """VAE factor times patch size: 16 in the released models."""
        return self.pipeline.vae_scale_factor * self.pipeline.transformer.config.patch_size

    def schedule(self, num_steps: int) -> Float[Tensor, " S"]:
        """Return the σ of FlowMatchEuler's steps."""
        return own_schedule(self.pipeline.scheduler, num_steps)

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, ...]:
        """Return (C, h, w)."""
        factor = self.pipeline.vae_scale_factor
        return (self.pipeline.vae.config.latent_channels, height // factor, width // factor)

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> TextCondition:
        """Return ``encoder_hidden_states`` [B, L, D] and ``pooled_projections`` [B, P]."""
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=list(prompts),
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=self._max_prompt_tokens,
        )
        return {"encoder_hidden_states": embeds, "pooled_projections": pooled}

    @property
    def max_prompt_tokens(self) -> int:
        """Of T5; without it, CLIP's 77."""
        if self.pipeline.tokenizer_3 is None:
            return int(self.pipeline.tokenizer_max_length)
        return self._max_prompt_tokens

    def prompt_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Return how many T5 has for each prompt; without it, CLIP."""
        return token_counts(self.pipeline.tokenizer_3 or self.pipeline.tokenizer, prompts)

    def encode_dropped(self, num: int) -> TextCondition:
        """Return the embedding of empty prompts."""
        return self.encode_text([""] * num)

    def encode_negative(self, num: int) -> TextCondition:
        """Return the embedding of empty prompts."""
        return self.encode_text([""] * num)

    def guide(
        self, positive: Float[Tensor, "B C h w"], negative: Float[Tensor, "B C h w"], scale: float
    ) -> Float[Tensor, "B C h w"]:
        """Return negative + scale · (positive - negative)."""
        return interpolated(positive, negative, scale)

    @torch.no_grad()
    def encode_pixels(self, pixels: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B C h w"]:
        """Return (z - shift) · scale of the posterior's mode, float32."""
        vae = self.pipeline.vae
        z = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode()
        return (z.float() - vae.config.shift_factor) * vae.config.scaling_factor

    def velocity(
        self,
        transformer: nn.Module,
        latents: Float[Tensor, "B C h w"],
        sigmas: Float[Tensor, " B"],
        text: TextCondition,
        given: Float[Tensor, "B 1 f 1 1"] | None = None,
    ) -> Float[Tensor, "B C h w"]:
        """Call the transformer at timestep 1000 σ."""
        no_given_frames(given, "StableDiffusion3Pipeline")
        return call_denoiser(transformer, latents, sigmas * TIMESTEPS, **text)

    @torch.no_grad()
    def decode(self, latents: Float[Tensor, "B C h w"]) -> Float[Tensor, "B 3 H W"]:
        """Return pixels of z = latents / scale + shift, not clipped."""
        vae = self.pipeline.vae
        z = latents / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(z.to(vae.dtype), return_dict=False)[0].float()
