"""Wan 2.1 and 2.2, text to video, through diffusers' ``WanPipeline``."""

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cosmos_wfm.adapter import TextCondition
from cosmos_wfm.experts import NoiseExperts
from cosmos_wfm.families.shared import (
    TIMESTEPS,
    call_denoiser,
    decode_video,
    encode_video,
    flow_shift,
    interpolated,
    no_given_frames,
    own_schedule,
    token_counts,
    video_latent_shape,
)


class WanAdapter:
    """Adapter for ``WanPipeline``; see ``DiffusionModelAdapter`` for the methods.

    Wan 2.2 divides the noise levels between two transformers at ``boundary_ratio``: both are
    trained, each on the levels that are its own. Its small form has one transformer that takes a
    timestep for each token (``expand_timesteps``), which in text to video is the same for all.
    """

    denoiser = "transformer"
    unsaved: Sequence[str] = ()
    max_given_frames = 0
    lora_targets: Sequence[str] = (
        "attn1.to_k",
        "attn1.to_out.0",
        "attn1.to_q",
        "attn1.to_v",
        "attn2.to_k",
        "attn2.to_out.0",
        "attn2.to_q",
        "attn2.to_v",
        "ffn.net.0.proj",
        "ffn.net.2",
    )

    def __init__(self, pipeline: Any, *, max_prompt_tokens: int = 512) -> None:
        """Adapt a pipeline.

        Args:
            pipeline: a ``WanPipeline``.
            max_prompt_tokens: to which a prompt is padded or cut.

        Raises:
            PipelineError: if it has a boundary, but not two transformers.
        """
        self.pipeline = pipeline
        self._max_prompt_tokens = max_prompt_tokens
        self._experts: NoiseExperts | None = None
        boundary = pipeline.config.boundary_ratio
        if boundary is not None:
            self._experts = NoiseExperts(
                pipeline.transformer, pipeline.transformer_2, boundary=boundary * TIMESTEPS
            )

    @property
    def transformer(self) -> nn.Module:
        """The Wan transformer, or both as one module."""
        return self.pipeline.transformer if self._experts is None else self._experts

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The transformer blocks, of both transformers if there are two."""
        parts: list[Any] = [self.pipeline.transformer]
        if self._experts is not None:
            parts.append(self.pipeline.transformer_2)
        return [block for part in parts for block in part.blocks]

    @property
    def shift(self) -> float:
        """3.0 or 5.0 in the released models."""
        return flow_shift(self.pipeline.scheduler, 3.0)

    @property
    def size_multiple(self) -> int:
        """VAE factor times patch size: 16 in the released models."""
        patch = self.pipeline.transformer.config.patch_size[1]
        return self.pipeline.vae_scale_factor_spatial * patch

    @property
    def temporal_factor(self) -> int:
        """4 in the released models."""
        return self.pipeline.vae_scale_factor_temporal

    def schedule(self, num_steps: int) -> Float[Tensor, " S"]:
        """Return the σ of the pipeline's solver."""
        return own_schedule(self.pipeline.scheduler, num_steps)

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, ...]:
        """Return (C, f, h, w)."""
        factors = (self.temporal_factor, self.pipeline.vae_scale_factor_spatial)
        channels = self.pipeline.transformer.config.in_channels
        return video_latent_shape(channels, frames, (height, width), factors)

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> TextCondition:
        """Return ``encoder_hidden_states`` [B, L, D], zeros behind each prompt's end."""
        embeds, _ = self.pipeline.encode_prompt(
            list(prompts),
            do_classifier_free_guidance=False,
            max_sequence_length=self._max_prompt_tokens,
        )
        return {"encoder_hidden_states": embeds}

    @property
    def max_prompt_tokens(self) -> int:
        """512 as the pipeline has it by default."""
        return self._max_prompt_tokens

    def prompt_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Return how many T5 has for each prompt."""
        clean = importlib.import_module(type(self.pipeline).__module__).prompt_clean
        return token_counts(self.pipeline.tokenizer, [clean(prompt) for prompt in prompts])

    def encode_dropped(self, num: int) -> TextCondition:
        """Return the embedding of empty prompts."""
        return self.encode_text([""] * num)

    def encode_negative(self, num: int) -> TextCondition:
        """Return the embedding of empty prompts."""
        return self.encode_text([""] * num)

    def guide(
        self,
        positive: Float[Tensor, "B C f h w"],
        negative: Float[Tensor, "B C f h w"],
        scale: float,
    ) -> Float[Tensor, "B C f h w"]:
        """Return negative + scale · (positive - negative)."""
        return interpolated(positive, negative, scale)

    def encode_pixels(self, pixels: Float[Tensor, "B 3 *S"]) -> Float[Tensor, "B C f h w"]:
        """Return (z - mean) / std, float32."""
        return encode_video(self.pipeline.vae, pixels)

    def velocity(
        self,
        transformer: nn.Module,
        latents: Float[Tensor, "B C f h w"],
        sigmas: Float[Tensor, " B"],
        text: TextCondition,
        given: Float[Tensor, "B 1 f 1 1"] | None = None,
    ) -> Float[Tensor, "B C f h w"]:
        """Call the transformer at timestep 1000 σ, which chooses one of two by it."""
        no_given_frames(given, "WanPipeline")
        timestep = sigmas * TIMESTEPS
        if self.pipeline.config.expand_timesteps:
            timestep = timestep[:, None].expand(-1, self._num_tokens(latents))
        return call_denoiser(transformer, latents, timestep, **text)

    def _num_tokens(self, latents: Float[Tensor, "B C f h w"]) -> int:
        sizes = zip(latents.shape[2:], self.pipeline.transformer.config.patch_size, strict=True)
        return math.prod(size // patch for size, patch in sizes)

    def decode(self, latents: Float[Tensor, "B C f h w"]) -> Float[Tensor, "B 3 F H W"]:
        """Return pixels of z = latents · std + mean, not clipped."""
        return decode_video(self.pipeline.vae, latents)
