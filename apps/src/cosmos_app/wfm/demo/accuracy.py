"""How often pictures have the colour that their prompt names, and a grid of them to look at."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from cosmos_app.wfm.demo.shapes import NAMES, SIZE
from cosmos_wfm import REWARDS, DiffusionModelAdapter, flow_schedule, sample_ode

_ENLARGED = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shown:
    """Pictures of prompts.

    Attributes:
        accuracy: share whose colour is the one named.
        prompts: of each row.
        pixels: of each, in [-1, 1].
    """

    accuracy: float
    prompts: Sequence[str]
    pixels: Float[Tensor, "P K 3 H W"]

    def save_grid(self, path: Path, *, num: int = 12) -> None:
        """Write the first ``num`` pictures of each prompt as a PNG, a row per prompt."""
        rows = (self.pixels[:, :num] * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
        grid = rows.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)  # [P·H, K·W, 3]
        picture = Image.fromarray(grid.contiguous().numpy())
        size = (picture.width * _ENLARGED, picture.height * _ENLARGED)
        picture.resize(size, Image.Resampling.NEAREST).save(path)


@torch.no_grad()
def show(
    adapter: DiffusionModelAdapter, prompts: Sequence[str], *, num_each: int, num_steps: int
) -> Shown:
    """Draw pictures of prompts, from the same noise at every call.

    Args:
        adapter: the model, as it is.
        prompts: what to draw.
        num_each: pictures of each prompt.
        num_steps: of the solver.
    """
    drawn: list[Tensor] = []
    for number, prompt in enumerate(prompts):
        text = adapter.encode_text([prompt] * num_each)
        generator = torch.Generator().manual_seed(1000 + number)
        noise = torch.randn(num_each, *adapter.latent_shape(1, SIZE, SIZE), generator=generator)

        def velocity(latents: Tensor, sigmas: Tensor, text: object = text) -> Tensor:
            return adapter.velocity(adapter.transformer, latents, sigmas, text)  # pyright: ignore[reportArgumentType]

        latents = sample_ode(velocity, noise, flow_schedule(num_steps, adapter.shift))
        drawn.append(adapter.decode(latents))
    pixels = torch.stack(drawn)
    right = [
        colour_of(picture) in prompt.split()
        for prompt, row in zip(prompts, pixels, strict=True)
        for picture in row
    ]
    return Shown(accuracy=sum(right) / len(right), prompts=prompts, pixels=pixels)


def colour_of(pixels: Float[Tensor, "3 H W"]) -> str:
    """Return the colour that the middle of a picture in [-1, 1] is nearest to."""
    unit = (pixels * 0.5 + 0.5).clamp(0.0, 1.0).unsqueeze(1)
    return max(NAMES, key=lambda name: REWARDS["prompt_colour"](unit, name))
