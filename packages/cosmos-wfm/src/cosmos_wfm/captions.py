"""A directory of images with captions: ``0001.json`` beside ``0001.png``, read one at a time."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from cosmos_wfm.errors import CaptionDataError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


class CaptionedImage(NamedTuple):
    """One sample: its prompt, and its pixels in [-1, 1]; a video has its frames before H."""

    prompt: str
    pixels: Float[Tensor, "3 ..."]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageCaptionsConfig:
    """Where the pairs are and how large the images are made.

    Attributes:
        path: directory of ``<name>.json`` files with a ``prompt``, each beside an image of the
            same name (png, jpg, jpeg or webp).
        height: of the images, in pixels.
        width: of the images, in pixels.
    """

    kind: Literal["images"] = "images"
    path: str
    height: int = 1024
    width: int = 1024

    def build(self) -> "ImageCaptions":
        """Open the directory.

        Raises:
            CaptionDataError: if there is no pair in it, or a broken one.
        """
        return ImageCaptions(Path(self.path), height=self.height, width=self.width)


class ImageCaptions(Sequence[CaptionedImage]):
    """The pairs of a directory, in order of their names.

    Prompts are read and pairs are matched on opening; images are decoded on access, scaled to
    cover the wanted size, and cropped to its centre.
    """

    def __init__(self, directory: Path, *, height: int, width: int) -> None:
        """Match and read all captions.

        Raises:
            CaptionDataError: names the directory without pairs, or every caption that has no
                image, no ``prompt`` or no valid JSON.
        """
        if not directory.is_dir():
            raise CaptionDataError(f"{directory} is not a directory")
        self._size = (height, width)
        self._pairs: list[tuple[str, Path]] = []
        problems: list[str] = []
        for caption in sorted(directory.glob("*.json")):
            found = _read_pair(caption)
            if isinstance(found, str):
                problems.append(found)
            else:
                self._pairs.append(found)
        if problems:
            shown = "; ".join(problems[:5]) + ("; ..." if len(problems) > 5 else "")
            raise CaptionDataError(f"{directory}: {len(problems)} broken pairs: {shown}")
        if not self._pairs:
            raise CaptionDataError(
                f"{directory} has no <name>.json beside <name>.png, .jpg, .jpeg or .webp"
            )

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._pairs)

    def __getitem__(self, index: int) -> CaptionedImage:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Decode one image.

        Raises:
            CaptionDataError: if the file is no image.
        """
        prompt, path = self._pairs[index]
        try:
            with Image.open(path) as image:
                pixels = fit(image.convert("RGB"), *self._size)
        except (UnidentifiedImageError, OSError) as error:
            raise CaptionDataError(f"{path} cannot be read as an image: {error}") from error
        return CaptionedImage(prompt, pixels)


def _read_pair(caption: Path) -> tuple[str, Path] | str:
    """Return prompt and image, or what is wrong."""
    try:
        prompt = json.loads(caption.read_text(encoding="utf-8"))["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        return f"{caption.name}: no prompt ({error!r})"
    if not isinstance(prompt, str):
        return f"{caption.name}: prompt is {type(prompt).__name__}, not text"
    images = [path for suffix in IMAGE_SUFFIXES if (path := caption.with_suffix(suffix)).is_file()]
    if len(images) != 1:
        return f"{caption.name}: {len(images)} images of that name, 1 is needed"
    return prompt, images[0]


def fit(image: Image.Image, height: int, width: int) -> Float[Tensor, "3 H W"]:
    """Scale to cover height x width, keep the centre, map to [-1, 1]."""
    scale = max(height / image.height, width / image.width)
    covered = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
    if covered != image.size:
        image = image.resize(covered, Image.Resampling.LANCZOS)
    left, top = (covered[0] - width) // 2, (covered[1] - height) // 2
    cropped = np.asarray(image.crop((left, top, left + width, top + height)), dtype=np.float32)
    return torch.from_numpy(cropped / 127.5 - 1.0).permute(2, 0, 1).contiguous()
