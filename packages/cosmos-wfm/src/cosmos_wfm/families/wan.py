"""Wan 2.1 and 2.2, text to video, through diffusers' ``WanPipeline``."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cosmos_wfm.adapter import TextCondition
from cosmos_wfm.errors import PipelineError
from cosmos_wfm.families.shared import (
    TIMESTEPS,
    decode_video,
    encode_video,
    flow_shift,
    interpolated,
    no_given_frames,
    own_schedule,
    video_latent_shape,
)


class WanAdapter:
    """Adapter for ``WanPipeline``; see ``DiffusionModelAdapter`` for the methods.

    Wan 2.2 divides the noise levels between two transformers at ``boundary_ratio``. The one that is
    trained is ``transformer``, of the high levels; the other, frozen, answers below the boundary.
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
            pipeline: a ``WanPipeline`` of text to video.
            max_prompt_tokens: to which a prompt is padded or cut.

        Raises:
            PipelineError: if it is one of text and image to video.
        """
        if pipeline.config.expand_timesteps:
            raise PipelineError("this WanPipeline makes videos from images (expand_timesteps)")
        self.pipeline = pipeline
        self._max_prompt_tokens = max_prompt_tokens

    @property
    def transformer(self) -> nn.Module:
        """The Wan transformer, of high noise levels if there are two."""
        return self.pipeline.transformer

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The transformer blocks."""
        return list(self.pipeline.transformer.blocks)

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
        """Call the transformer at timestep 1000 σ, and Wan 2.2's other one for low levels.

        Every call reaches ``transformer``, whose ranks may wait for each other.
        """
        no_given_frames(given, "WanPipeline")
        predicted = _call(transformer, latents, sigmas, text)
        boundary = self.pipeline.config.boundary_ratio
        if boundary is None or bool((sigmas >= boundary).all()):
            return predicted
        with torch.no_grad():
            other = _call(self.pipeline.transformer_2, latents, sigmas, text)
        return torch.where((sigmas >= boundary).view(-1, 1, 1, 1, 1), predicted, other)

    def decode(self, latents: Float[Tensor, "B C f h w"]) -> Float[Tensor, "B 3 F H W"]:
        """Return pixels of z = latents · std + mean, not clipped."""
        return decode_video(self.pipeline.vae, latents)


def _call(
    transformer: nn.Module, latents: Tensor, sigmas: Tensor, text: TextCondition
) -> Float[Tensor, "B C f h w"]:
    return transformer(
        hidden_states=latents, timestep=sigmas * TIMESTEPS, return_dict=False, **text
    )[0]
