"""SANA-Video through diffusers' ``SanaVideoPipeline``."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from cosmos_wfm.adapter import TextCondition
from cosmos_wfm.families.sana import SANA_LORA_TARGETS
from cosmos_wfm.families.shared import (
    TIMESTEPS,
    GemmaPrompts,
    call_denoiser,
    decode_video,
    encode_video,
    flow_shift,
    interpolated,
    no_given_frames,
    own_schedule,
    video_latent_shape,
    without_learned_variance,
)


class SanaVideoAdapter:
    """Adapter for ``SanaVideoPipeline``; see ``DiffusionModelAdapter`` for the methods.

    Text as for SANA images, with the video instruction. Latents are those of Wan's VAE, of LTX2's
    or of a deep-compression VAE, each normalised by its own constants.
    """

    denoiser = "transformer"
    unsaved: Sequence[str] = ()
    max_given_frames = 0
    lora_targets: Sequence[str] = SANA_LORA_TARGETS

    def __init__(
        self,
        pipeline: Any,
        *,
        max_prompt_tokens: int = 300,
        instruction: Sequence[str] | None = None,
    ) -> None:
        """Adapt a pipeline.

        Args:
            pipeline: a ``SanaVideoPipeline``.
            max_prompt_tokens: of a prompt, without the instruction.
            instruction: put before each prompt; ``None`` for the pipeline's own.
        """
        self.pipeline = pipeline
        self._prompts = GemmaPrompts(pipeline, max_prompt_tokens, instruction)

    @property
    def transformer(self) -> nn.Module:
        """The SANA-Video transformer."""
        return self.pipeline.transformer

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The linear-attention blocks."""
        return list(self.pipeline.transformer.transformer_blocks)

    @property
    def shift(self) -> float:
        """8.0 in the released models."""
        return flow_shift(self.pipeline.scheduler, 8.0)

    @property
    def size_multiple(self) -> int:
        """32, which the pipeline insists on."""
        return 32

    @property
    def temporal_factor(self) -> int:
        """4 with Wan's VAE."""
        return self.pipeline.vae_scale_factor_temporal

    def schedule(self, num_steps: int) -> Float[Tensor, " S"]:
        """Return the σ of the pipeline's solver."""
        return own_schedule(self.pipeline.scheduler, num_steps)

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, ...]:
        """Return (C, f, h, w)."""
        factors = (self.temporal_factor, self.pipeline.vae_scale_factor_spatial)
        channels = self.pipeline.transformer.config.in_channels
        return video_latent_shape(channels, frames, (height, width), factors)

    def encode_text(self, prompts: Sequence[str]) -> TextCondition:
        """Return ``encoder_hidden_states`` [B, L, D] and ``encoder_attention_mask`` [B, L]."""
        return self._prompts.encode(prompts)

    @property
    def max_prompt_tokens(self) -> int:
        """Without the instruction."""
        return self._prompts.max_tokens

    def prompt_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Return how many Gemma has for each prompt without the instruction."""
        return self._prompts.lengths(prompts)

    def encode_dropped(self, num: int) -> TextCondition:
        """Return empty prompts without instruction."""
        return self._prompts.empty(num)

    def encode_negative(self, num: int) -> TextCondition:
        """Return empty prompts without instruction."""
        return self._prompts.empty(num)

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
        """Call the transformer at timestep 1000 σ."""
        no_given_frames(given, "SanaVideoPipeline")
        prediction = call_denoiser(transformer, latents, sigmas * TIMESTEPS, **text)
        return without_learned_variance(prediction, latents)

    def decode(self, latents: Float[Tensor, "B C f h w"]) -> Float[Tensor, "B 3 F H W"]:
        """Return pixels of z = latents · std + mean, not clipped."""
        return decode_video(self.pipeline.vae, latents)
