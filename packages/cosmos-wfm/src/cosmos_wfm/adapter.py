"""What training needs of a diffusion backbone, and nothing else.

Conventions of the whole package: x_t = (1 - σ) x_0 + σ ε with σ in [0, 1], 1 being noise, and a
velocity v = ε - x_0. Latents are normalised (what the transformer sees), pixels are in [-1, 1].
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxtyping import Float
from torch import Tensor, nn

TextCondition = Mapping[str, Tensor]
"""Embedded prompts, keyed by the transformer's own argument; the first axis of each is B."""


class DiffusionModelAdapter(Protocol):
    """One family of diffusers pipelines, as losses and samplers see it.

    Everything but ``velocity`` runs without gradient on frozen components.
    """

    @property
    def pipeline(self) -> Any:
        """The diffusers pipeline that is adapted; its components are shared, not copied."""
        ...

    @property
    def transformer(self) -> nn.Module:
        """The denoiser that is trained."""
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

    def schedule(self, num_steps: int) -> Float[Tensor, " S"]:
        """Return the σ of each step of the model's own sampler and a last 0: S = num_steps + 1."""
        ...

    def encode_text(self, prompts: Sequence[str]) -> TextCondition:
        """Embed prompts as the pipeline does."""
        ...

    def encode_pixels(self, pixels: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B C h w"]:
        """Return normalised latents, the posterior's mode: the same for the same pixels."""
        ...

    def velocity(
        self,
        transformer: nn.Module,
        latents: Float[Tensor, "B C h w"],
        sigmas: Float[Tensor, " B"],
        text: TextCondition,
    ) -> Float[Tensor, "B C h w"]:
        """Predict ε - x_0 with a transformer of this family, sharded or whole, with gradient."""
        ...

    def decode(self, latents: Float[Tensor, "B C h w"]) -> Float[Tensor, "B 3 H W"]:
        """Return the pixels of normalised latents."""
        ...
