"""Six pictures of a coloured square, with captions."""

import json
from pathlib import Path

from PIL import Image

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 30),
    "blue": (30, 30, 220),
    "yellow": (220, 220, 30),
    "white": (250, 250, 250),
    "black": (5, 5, 5),
}


def tiny_captions(directory: Path, *, size: int = 32) -> None:
    """Write six pictures of a coloured square on grey, with captions, into a new directory.

    Args:
        directory: made if it is not there; holds ``0001.png`` and ``0001.json`` and so on.
        size: of the pictures, in pixels.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for number, (name, colour) in enumerate(COLOURS.items(), start=1):
        picture = Image.new("RGB", (size, size), (128, 128, 128))
        picture.paste(colour, (size // 4, size // 4, 3 * size // 4, 3 * size // 4))
        picture.save(directory / f"{number:04}.png")
        caption = json.dumps({"prompt": f"a {name} square"})
        (directory / f"{number:04}.json").write_text(caption)
