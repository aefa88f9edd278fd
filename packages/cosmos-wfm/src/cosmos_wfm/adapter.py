"""What training needs of a diffusion backbone, and nothing else.

Conventions of the whole package: x_t = (1 - σ) x_0 + σ ε with σ in [0, 1], 1 being noise, and a
velocity v = ε - x_0. Latents are normalised (what the denoiser sees), pixels are in [-1, 1].
Images are [B, 3, H, W], videos [B, 3, F, H, W]; latents have one axis more than images where the
model is one of videos. Shapes below say ``*s`` for (h, w) or (f, h, w).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

TextCondition = Mapping[str, Tensor]
"""Embedded prompts, keyed by the denoiser's own argument; the first axis of each is B."""


def device_of(module: nn.Module) -> torch.device:
    """Return where a denoiser computes, and therefore what it is given has to be."""
    return next(module.parameters()).device


def pipeline_modules(adapter: "DiffusionModelAdapter") -> list[nn.Module]:
    """Return a pipeline's models, and the modules of each: a decoder is called without its VAE."""
    models = [each for each in adapter.pipeline.components.values() if isinstance(each, nn.Module)]
    return [*models, *(module for model in models for module in model.children())]


class DiffusionModelAdapter(Protocol):
    """One family of diffusers pipelines, as losses and samplers see it.

    Everything but ``velocity`` runs without gradient on frozen components.
    """

    @property
    def pipeline(self) -> Any:
        """The diffusers pipeline that is adapted; its components are shared, not copied."""
        ...

    @property
    def denoiser(self) -> str:
        """The pipeline's name of the component that is trained: ``transformer``, or ``unet``.

        Of the first, where two are trained.
        """
        ...

    @property
    def transformer(self) -> nn.Module:
        """The component of that name, or ``NoiseExperts`` that hold it and another."""
        ...

    @property
    def unsaved(self) -> Sequence[str]:
        """Names of components that are never written: stand-ins of ours."""
        ...

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The denoiser's layers of about equal size, in order: what sharding wraps."""
        ...

    @property
    def lora_targets(self) -> Sequence[str]:
        """Names of the linear layers that adapters go to."""
        ...

    @property
    def shift(self) -> float:
        """The σ shift this model is trained with: σ = s u / (1 + (s - 1) u)."""
        ...

    @property
    def size_multiple(self) -> int:
        """Height and width in pixels must be multiples of this."""
        ...

    @property
    def temporal_factor(self) -> int:
        """Frames beyond the first that share a latent frame; 0 for a model of images."""
        ...

    @property
    def max_given_frames(self) -> int:
        """Most latent frames that may be given as condition; 0 where the model takes none."""
        ...

    def schedule(self, num_steps: int) -> Float[Tensor, " S"]:
        """Return the σ of each step of the pipeline's own sampler and a last 0: S = num_steps + 1.

        For comparisons with the pipeline; training samples by ``sampling.flow_schedule``.
        """
        ...

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, ...]:
        """Return the shape of one sample's latents; an image has 1 frame."""
        ...

    def encode_text(self, prompts: Sequence[str]) -> TextCondition:
        """Embed prompts as the pipeline does, enhancement included."""
        ...

    def encode_dropped(self, num: int) -> TextCondition:
        """Return what a sample is trained with whose prompt is dropped, for guidance."""
        ...

    def encode_negative(self, num: int) -> TextCondition:
        """Return what the pipeline's guidance leads away from, by default."""
        ...

    def guide(
        self, positive: Float[Tensor, "B C *s"], negative: Float[Tensor, "B C *s"], scale: float
    ) -> Float[Tensor, "B C *s"]:
        """Combine two velocities as the pipeline does for a ``guidance_scale``."""
        ...

    def encode_pixels(self, pixels: Float[Tensor, "B 3 *S"]) -> Float[Tensor, "B C *s"]:
        """Return normalised latents, the posterior's mode: the same for the same pixels."""
        ...

    def velocity(
        self,
        transformer: nn.Module,
        latents: Float[Tensor, "B C *s"],
        sigmas: Float[Tensor, " B"],
        text: TextCondition,
        given: Float[Tensor, "B 1 f 1 1"] | None = None,
    ) -> Float[Tensor, "B C *s"]:
        """Predict ε - x_0 with a denoiser of this family, sharded or whole, with gradient.

        Args:
            transformer: the denoiser, or another of its kind.
            latents: x_t; clean in the frames that are given.
            sigmas: noise level of each sample.
            text: as this adapter embedded it.
            given: 1 in the latent frames that are a condition and no noise; ``None`` for none.
        """
        ...

    def decode(self, latents: Float[Tensor, "B C *s"]) -> Float[Tensor, "B 3 *S"]:
        """Return the pixels of normalised latents, not clipped."""
        ...
