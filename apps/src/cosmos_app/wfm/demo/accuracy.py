"""How often pictures have the colour that their prompt names."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from cosmos_app.wfm.demo.shapes import NAMES
from cosmos_wfm import REWARDS


def colour_accuracy(pixels: Float[Tensor, "P K 3 H W"], prompts: Sequence[str]) -> float:
    """Return the share of pictures in [-1, 1] that have the colour of their row's prompt."""
    right = [
        colour_of(picture) in prompt.split()
        for prompt, row in zip(prompts, pixels, strict=True)
        for picture in row
    ]
    return sum(right) / len(right)


def colour_of(pixels: Float[Tensor, "3 H W"]) -> str:
    """Return the colour that the middle of a picture in [-1, 1] is nearest to."""
    unit = (pixels * 0.5 + 0.5).clamp(0.0, 1.0).unsqueeze(1)
    return max(NAMES, key=lambda name: REWARDS["prompt_colour"](unit, name))
