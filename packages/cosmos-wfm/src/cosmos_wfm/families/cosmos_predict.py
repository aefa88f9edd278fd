"""Cosmos-Predict2.5 through diffusers' ``Cosmos2_5_PredictBasePipeline``."""

import copy
import importlib
import importlib.util
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cosmos_wfm.adapter import TextCondition
from cosmos_wfm.families.shared import (
    call_denoiser,
    decode_video,
    encode_video,
    own_schedule,
    token_counts,
    video_latent_shape,
)

SHIFT = 5.0
GIVEN_SIGMA = 1e-4
SYSTEM = "You are a helpful assistant who will provide prompts to an image generator."
"""What the pipeline has Qwen told, which counts among the tokens of a prompt."""


class NoSafetyChecker(nn.Module):
    """Stands where the pipeline wants ``cosmos_guardrail``, which training does not run.

    The pipeline builds the real checker, with its downloads, when it is given none. This one lets
    everything pass and is never saved, so generation with what was trained uses the real one.

    Pipelines ask every module, and this one perhaps first, where it is: it has one value to move.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_place", torch.zeros(1), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the pipeline was put."""
        return self.get_buffer("_place").device

    @property
    def dtype(self) -> torch.dtype:
        """In which type the pipeline was put there."""
        return self.get_buffer("_place").dtype

    def check_text_safety(self, prompt: str) -> bool:
        """Let a prompt pass."""
        return True

    def check_video_safety(self, frames: object) -> object:
        """Let frames pass."""
        return frames


class SkippingProjection(nn.Sequential):
    """The transformer's text projection, which leaves alone what was projected before.

    Same children, hence the same names of weights.
    """

    def forward(self, input: Tensor) -> Tensor:  # the name is torch's
        """Project [B, L, all layers] to [B, L, D], and return [B, L, D] as it is."""
        if input.shape[-1] == self[0].out_features:
            return input
        return super().forward(input)


class CosmosPredictAdapter:
    """Adapter for ``Cosmos2_5_PredictBasePipeline``; see ``DiffusionModelAdapter``.

    The transformer takes σ itself, not 1000 σ, and a mask of the frames that are given: those are
    clean, at level 1e-4, and their velocity is not the model's to predict. Guidance is
    positive + scale · (positive - negative), one more than elsewhere. Text is all hidden layers of
    Qwen2.5-VL, 100,352 wide as released; while its projection is frozen, as with LoRA, what
    ``encode_text`` returns is projected already, 98 times smaller.
    """

    denoiser = "transformer"
    unsaved: Sequence[str] = ("safety_checker",)
    max_given_frames = 2
    lora_targets: Sequence[str] = (
        "ff.net.0.proj",
        "ff.net.2",
        "to_k",
        "to_out.0",
        "to_q",
        "to_v",
    )

    def __init__(self, pipeline: Any, *, max_prompt_tokens: int = 512) -> None:
        """Adapt a pipeline.

        Args:
            pipeline: a ``Cosmos2_5_PredictBasePipeline``, with ``NoSafetyChecker`` or the real one.
            max_prompt_tokens: to which the chat of a prompt is padded or cut.
        """
        self.pipeline = pipeline
        self._max_prompt_tokens = max_prompt_tokens
        projection = getattr(pipeline.transformer, "crossattn_proj", None)
        self._projection: nn.Module | None = copy.deepcopy(projection)
        if projection is not None:
            pipeline.transformer.crossattn_proj = SkippingProjection(*projection)

    @property
    def transformer(self) -> nn.Module:
        """The Cosmos transformer."""
        return self.pipeline.transformer

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The transformer blocks."""
        return list(self.pipeline.transformer.transformer_blocks)

    @property
    def shift(self) -> float:
        """5.0, of the model's own training; its sampler's Karras levels have none."""
        return SHIFT

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
        """Return the σ of UniPC's Karras levels."""
        return own_schedule(self.pipeline.scheduler, num_steps)

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, ...]:
        """Return (C, f, h, w)."""
        factors = (self.temporal_factor, self.pipeline.vae_scale_factor_spatial)
        channels = self.pipeline.transformer.config.in_channels - 1  # one is the mask's
        return video_latent_shape(channels, frames, (height, width), factors)

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> TextCondition:
        """Return ``encoder_hidden_states`` [B, L, D], projected while the projection is frozen."""
        embeds, _ = self.pipeline.encode_prompt(
            list(prompts),
            do_classifier_free_guidance=False,
            max_sequence_length=self._max_prompt_tokens,
        )
        return {"encoder_hidden_states": self._projected(embeds)}

    @property
    def max_prompt_tokens(self) -> int:
        """512 as the pipeline has it by default, with the chat around the prompt."""
        return self._max_prompt_tokens

    def prompt_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Return how many Qwen has for each prompt, with the chat around it."""
        tokenizer = self.pipeline.tokenizer
        chats = [
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
            for prompt in prompts
        ]
        texts = tokenizer.apply_chat_template(chats, tokenize=False)
        return token_counts(tokenizer, texts)

    def encode_dropped(self, num: int) -> TextCondition:
        """Return embeddings of zeros, the model's own way to drop a prompt."""
        width = self.pipeline.transformer.config.crossattn_proj_in_channels
        shape = (num, self._max_prompt_tokens, width)
        encoder = self.pipeline.text_encoder
        zeros = torch.zeros(shape, dtype=encoder.dtype, device=encoder.device)
        return {"encoder_hidden_states": self._projected(zeros)}

    @torch.no_grad()
    def encode_negative(self, num: int) -> TextCondition:
        """Return the embedding of the pipeline's own description of a bad video."""
        negative = importlib.import_module(type(self.pipeline).__module__).DEFAULT_NEGATIVE_PROMPT
        return self.encode_text([negative] * num)

    def guide(
        self,
        positive: Float[Tensor, "B C f h w"],
        negative: Float[Tensor, "B C f h w"],
        scale: float,
    ) -> Float[Tensor, "B C f h w"]:
        """Return positive + scale · (positive - negative)."""
        return positive + scale * (positive - negative)

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
        """Call the transformer at σ in [0, 1], with the mask of given frames."""
        num, _, frames, height, width = latents.shape
        timesteps = sigmas
        mask = latents.new_zeros(num, 1, frames, height, width)
        if given is not None:
            mask = given.to(latents.dtype).expand_as(mask)
            timesteps = given * GIVEN_SIGMA + (1.0 - given) * sigmas.view(-1, 1, 1, 1, 1)
        size = self.pipeline.vae_scale_factor_spatial
        return call_denoiser(
            transformer,
            latents,
            timesteps,
            condition_mask=mask,
            padding_mask=latents.new_zeros(1, 1, height * size, width * size),
            **text,
        )

    def decode(self, latents: Float[Tensor, "B C f h w"]) -> Float[Tensor, "B 3 F H W"]:
        """Return pixels of z = latents · std + mean, not clipped."""
        return decode_video(self.pipeline.vae, latents)

    @property
    def trains_text(self) -> bool:
        """Whether the projection is trained, so that ``encode_text`` leaves it out."""
        if self._projection is None:
            return False
        trained = self.pipeline.transformer.crossattn_proj.parameters()
        return any(parameter.requires_grad for parameter in trained)

    @torch.no_grad()
    def _projected(self, embeds: Float[Tensor, "B L W"]) -> Float[Tensor, "B L D"]:
        if self._projection is None or self.trains_text:
            return embeds
        # a copy of its own, which the pipeline does not take along
        own = next(self._projection.parameters()).dtype  # the text encoder may have another
        return self._projection.to(embeds.device)(embeds.to(own))


def resize_without_torchvision() -> None:
    """Give diffusers' Cosmos transformer the one function of torchvision that it calls.

    It resizes its padding mask to the nearest pixel with ``torchvision.transforms.functional``. The
    name is missing where torchvision is not installed, and stays as it is where it is.
    """
    module = importlib.import_module("diffusers.models.transformers.transformer_cosmos")
    if importlib.util.find_spec("torchvision") is None and "transforms" not in vars(module):
        functional = SimpleNamespace(resize=_resize_nearest)
        modes = SimpleNamespace(NEAREST="nearest")
        vars(module)["transforms"] = SimpleNamespace(functional=functional, InterpolationMode=modes)


def _resize_nearest(image: Tensor, size: Sequence[int], interpolation: str) -> Tensor:
    return nn.functional.interpolate(image, size=list(size), mode=interpolation)
