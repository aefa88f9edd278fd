"""SANA and SANA 1.5 images through diffusers' ``SanaPipeline``; SANA-Sprint's is another."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cosmos_wfm.adapter import TextCondition
from cosmos_wfm.families.shared import (
    TIMESTEPS,
    GemmaPrompts,
    call_denoiser,
    flow_shift,
    interpolated,
    no_given_frames,
    own_schedule,
    without_learned_variance,
)

SANA_LORA_TARGETS = (
    "attn1.to_k",
    "attn1.to_out.0",
    "attn1.to_q",
    "attn1.to_v",
    "attn2.to_k",
    "attn2.to_out.0",
    "attn2.to_q",
    "attn2.to_v",
)


class SanaAdapter:
    """Adapter for ``SanaPipeline``; see ``DiffusionModelAdapter`` for the methods.

    The deep-compression VAE is deterministic and only scaled. Prompts get the pipeline's own
    instruction in front, in training as in inference; the negative ones do not. The transformer
    takes ``encoder_attention_mask`` and a float timestep 1000 σ times its own scale.

    Gemma 2 embeds as the pipeline loads it: by torch's attention, which drops the bound of 50 on
    its scores. Why: training and the pipeline see the same; see the README for the other.
    """

    denoiser = "transformer"
    unsaved: Sequence[str] = ()
    temporal_factor = 0
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
            pipeline: a ``SanaPipeline``.
            max_prompt_tokens: of a prompt, without the instruction.
            instruction: put before each prompt; ``None`` for the pipeline's own.
        """
        self.pipeline = pipeline
        self._prompts = GemmaPrompts(pipeline, max_prompt_tokens, instruction)

    @property
    def transformer(self) -> nn.Module:
        """The SANA transformer."""
        return self.pipeline.transformer

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The linear-attention blocks."""
        return list(self.pipeline.transformer.transformer_blocks)

    @property
    def shift(self) -> float:
        """3.0 in the released models."""
        return flow_shift(self.pipeline.scheduler, 3.0)

    @property
    def size_multiple(self) -> int:
        """32, the VAE's factor in the released models, which the pipeline insists on."""
        return 32

    def schedule(self, num_steps: int) -> Float[Tensor, " S"]:
        """Return the σ of the pipeline's solver."""
        return own_schedule(self.pipeline.scheduler, num_steps)

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, ...]:
        """Return (C, h, w)."""
        factor = self.pipeline.vae_scale_factor
        return (self.pipeline.vae.config.latent_channels, height // factor, width // factor)

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
        self, positive: Float[Tensor, "B C h w"], negative: Float[Tensor, "B C h w"], scale: float
    ) -> Float[Tensor, "B C h w"]:
        """Return negative + scale · (positive - negative)."""
        return interpolated(positive, negative, scale)

    @torch.no_grad()
    def encode_pixels(self, pixels: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B C h w"]:
        """Return z · scale, float32."""
        vae = self.pipeline.vae
        z = vae.encode(pixels.to(vae.device, vae.dtype)).latent
        return z.float() * vae.config.scaling_factor

    def velocity(
        self,
        transformer: nn.Module,
        latents: Float[Tensor, "B C h w"],
        sigmas: Float[Tensor, " B"],
        text: TextCondition,
        given: Float[Tensor, "B 1 f 1 1"] | None = None,
    ) -> Float[Tensor, "B C h w"]:
        """Call the transformer at timestep 1000 σ · timestep_scale."""
        no_given_frames(given, "SanaPipeline")
        scale = TIMESTEPS * self.pipeline.transformer.config.timestep_scale
        prediction = call_denoiser(transformer, latents, sigmas * scale, **text)
        return without_learned_variance(prediction, latents)

    @torch.no_grad()
    def decode(self, latents: Float[Tensor, "B C h w"]) -> Float[Tensor, "B 3 H W"]:
        """Return pixels of z = latents / scale, not clipped."""
        vae = self.pipeline.vae
        z = (latents / vae.config.scaling_factor).to(vae.dtype)
        return vae.decode(z, return_dict=False)[0].float()
