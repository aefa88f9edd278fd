"""Pictures of coloured shapes whose captions name the wrong colour as often as not."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from cosmos_wfm import COLOURS

SIZE = 16
NAMES = ("red", "green", "blue", "yellow")
SHAPES = ("square", "disc", "diamond")
HELD_OUT = SHAPES[-1]
"""No prompt of RL names this shape; accuracy is measured on prompts that do."""
_GREY = (128, 128, 128)
_HALF = 5


def prompts_of(shapes: Sequence[str]) -> list[str]:
    """Return a prompt for each colour of each shape."""
    return [f"a {colour} {shape}" for shape in shapes for colour in NAMES]


def write_shapes(directory: Path, *, num_each: int, share_right: float, seed: int) -> None:
    """Write pairs of a picture and a caption into a new directory.

    Args:
        directory: made; holds ``0000.png`` and ``0000.json`` and so on.
        num_each: pictures of each shape in each colour.
        share_right: share of captions that name the colour that is seen; the others name another.
        seed: of places, shades and captions.
    """
    directory.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    kinds = [(colour, shape) for shape in SHAPES for colour in NAMES] * num_each
    for number, (colour, shape) in enumerate(kinds):
        draw(shape, colour, generator).save(directory / f"{number:04}.png")
        named = colour
        if generator.random() >= share_right:
            named = str(generator.choice([name for name in NAMES if name != colour]))
        caption = json.dumps({"prompt": f"a {named} {shape}"})
        (directory / f"{number:04}.json").write_text(caption, encoding="utf-8")


def draw(shape: str, colour: str, generator: np.random.Generator) -> Image.Image:
    """Return a picture of a shape near the middle, in a shade of its colour."""
    shade = np.array(COLOURS[colour]) * 255.0 + generator.normal(0.0, 8.0, 3)
    fill = tuple(int(value) for value in shade.clip(0, 255))
    x, y = (SIZE // 2 + int(generator.integers(-1, 2)) for _ in range(2))
    picture = Image.new("RGB", (SIZE, SIZE), _GREY)
    pen, half = ImageDraw.Draw(picture), _HALF
    if shape == "square":
        pen.rectangle((x - half, y - half, x + half - 1, y + half - 1), fill)
    elif shape == "disc":
        pen.ellipse((x - half - 1, y - half - 1, x + half, y + half), fill)
    else:
        reach = half + 3
        pen.polygon([(x - reach, y), (x, y - reach), (x + reach, y), (x, y + reach)], fill)
    return picture
