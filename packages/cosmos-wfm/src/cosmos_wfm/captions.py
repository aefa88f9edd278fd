"""Directories of images with captions: ``0001.json`` beside ``0001.png``, read one at a time."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from cosmos_core.colours import in_srgb
from cosmos_core.images import refuse_programs
from cosmos_wfm.caption_data import (
    CAPTION_SUFFIXES,
    BrokenPolicy,
    CaptionedFiles,
    CaptionedImage,
    files_by_stem,
    of_suffix,
    read_caption,
)
from cosmos_wfm.errors import CaptionDataError
from cosmos_wfm.ranges import check_at_least

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_STEPS_OF_16_BITS = 257
"""65535 / 255."""
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What puts a picture of an EXIF orientation upright."""
_UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
"""What PIL raises over broken files; those that it cannot name are an OSError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageCaptionsConfig:
    """Where the pairs are and how large the images are made.

    Attributes:
        path: directory of ``<name>.json`` files with a ``prompt``, or ``<name>.txt``, each beside
            an image of the same name (png, jpg, jpeg or webp); in folders of it as well.
        height: of the images, in pixels.
        width: of the images, in pixels.
        buckets: sizes [height, width], of which each image gets the one nearest in shape; empty
            gives all images the one above.
        max_enlargement: largest factor by which an image may be scaled up to that size; one that
            is smaller is broken. 0 takes every image.
        broken: what to do with a caption without image, an image without caption, one of a wrong
            size and what cannot be decoded: ``fatal``, or ``skip``, which names and counts it.
    """

    kind: Literal["images"] = "images"
    path: str
    height: int = 1024
    width: int = 1024
    buckets: tuple[tuple[int, int], ...] = ()
    max_enlargement: float = 0.0
    broken: BrokenPolicy = "fatal"

    def __post_init__(self) -> None:
        """Check the ranges; sizes are held against the model.

        Raises:
            WfmConfigError: names the field that is out of range.
        """
        check_at_least("data", self, max_enlargement=0)

    def build(self) -> "ImageCaptions":
        """Open the directory.

        Raises:
            CaptionDataError: if there is no pair in it, or a broken one that is fatal.
        """
        return ImageCaptions(self)


class ImageCaptions(CaptionedFiles):
    """The pairs of a directory and its folders, in order of their names.

    Prompts are read and pairs are matched on opening; images are decoded on access, scaled to
    cover the wanted size, and cropped to its centre.
    """

    def __init__(self, config: ImageCaptionsConfig) -> None:
        """Match and read all captions.

        Raises:
            CaptionDataError: names the directory without pairs, the folder that cannot be read, or
                every caption that has no image, no ``prompt`` or no valid JSON, and every image
                without caption.
        """
        directory = Path(config.path)
        super().__init__(directory, config.broken)
        self._config = config
        for captions, images in _candidates(directory):
            try:
                self._pairs.append(_read_pair(captions, images, directory))
            except CaptionDataError as error:
                self.problems.add(str(error))
        self.problems.refuse()
        if not self._pairs:
            raise CaptionDataError(
                f"{directory} has no <name>.json or .txt beside <name>.png, .jpg, .jpeg or .webp "
                f"({len(self.problems)} left out)"
            )

    def _decoded(self, prompt: str, path: Path) -> CaptionedImage:
        image = read_image(path, name=str(path))
        return CaptionedImage(prompt, fit_sizes(image, self._config, name=str(path)))


def _candidates(root: Path) -> list[tuple[list[Path], list[Path]]]:
    """Return captions and images of every name that has a JSON or an image."""
    found: list[tuple[list[Path], list[Path]]] = []
    for files in files_by_stem(root).values():
        images = of_suffix(files, IMAGE_SUFFIXES)
        captions = of_suffix(files, CAPTION_SUFFIXES if images else (".json",))
        if captions or images:
            found.append((captions, images))
    return sorted(found)


def _read_pair(captions: Sequence[Path], images: Sequence[Path], root: Path) -> tuple[str, Path]:
    """Return prompt and image.

    Raises:
        CaptionDataError: says what is wrong with them.
    """
    name = (*captions, *images)[0].relative_to(root)
    if not captions:
        raise CaptionDataError(f"{name}: there is no {name.stem}.json or {name.stem}.txt")
    prompt = read_caption(captions, name=str(name))
    if len(images) != 1:
        raise CaptionDataError(f"{name}: {len(images)} images of that name, 1 is needed")
    return prompt, images[0]


def read_image(source: Path | BinaryIO, *, name: str) -> Image.Image:
    """Return a picture upright, in 8 bits of sRGB, on white where it lets through.

    Args:
        source: a file, or its bytes as a stream.
        name: of the picture, for errors.

    Raises:
        CaptionDataError: if it cannot be decoded, or is larger than PIL opens.
    """
    try:
        with Image.open(source) as image:
            refuse_programs(image.format)
            turn = _UPRIGHT.get(_orientation(image))
            upright = image if turn is None else image.transpose(turn)
            if upright.mode.startswith("I;16"):  # convert() would cut off what is above 255
                grey = np.asarray(upright).astype(np.float64) / _STEPS_OF_16_BITS
                upright = Image.fromarray(grey.round().astype(np.uint8))
            upright = in_srgb(upright, image.info.get("icc_profile"))
            if upright.has_transparency_data:  # convert() would show what lies under it
                layer = upright.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
            return upright.convert("RGB")
    except _UNREADABLE as error:
        raise CaptionDataError(f"{name} cannot be read as an image: {error}") from error


def _orientation(image: Image.Image) -> int:
    """Return how EXIF says that a picture was held; 1, upright, where that cannot be read.

    Not PIL's ``exif_transpose``, which also writes all of EXIF anew and fails over what cameras and
    editors leave there.
    """
    try:
        found: object = image.getexif().get(_ORIENTATION)
    except (SyntaxError, ValueError, TypeError, struct.error):
        return 1
    return found if isinstance(found, int) else 1


class Sizes(Protocol):
    """The part of a data config that says how large samples are made."""

    @property
    def height(self) -> int:
        """In pixels, where there are no buckets."""
        ...

    @property
    def width(self) -> int:
        """In pixels, where there are no buckets."""
        ...

    @property
    def buckets(self) -> tuple[tuple[int, int], ...]:
        """Sizes to choose from."""
        ...

    @property
    def max_enlargement(self) -> float:
        """Largest factor by which a picture may be scaled up; 0 for any."""
        ...


def fit_sizes(image: Image.Image, sizes: Sizes, *, name: str) -> Float[Tensor, "3 H W"]:
    """Return a picture's pixels in the size that it is made.

    Raises:
        CaptionDataError: says under ``name`` that it would have to be enlarged too much.
    """
    height, width = size_of(image, sizes)
    factor = max(height / image.height, width / image.width)
    if factor > sizes.max_enlargement > 0:
        raise CaptionDataError(
            f"{name} is {image.height}x{image.width} pixels; for {height}x{width} it would be "
            f"enlarged {factor:.3g} times, and max_enlargement is {sizes.max_enlargement:g}"
        )
    return fit(image, height, width)


def size_of(image: Image.Image, sizes: Sizes) -> tuple[int, int]:
    """Return height and width that an image is made: of the bucket nearest in shape, if any.

    Shapes are compared by |log(h / w) - log(h' / w')|: twice as wide is as far as twice as high.
    """
    if not sizes.buckets:
        return sizes.height, sizes.width
    shape = math.log(image.height / image.width)
    return min(sizes.buckets, key=lambda size: abs(math.log(size[0] / size[1]) - shape))


def fit(image: Image.Image, height: int, width: int) -> Float[Tensor, "3 H W"]:
    """Scale to cover height x width, keep the centre, map to [-1, 1].

    Only what is kept is scaled: of a line of 1000x1 pixels the whole would take gigabytes.
    """
    scale = max(height / image.height, width / image.width)
    covered = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
    left, top = (covered[0] - width) // 2, (covered[1] - height) // 2
    if covered == image.size:
        image = image.crop((left, top, left + width, top + height))
    else:
        across, down = image.width / covered[0], image.height / covered[1]
        kept = (left * across, top * down, (left + width) * across, (top + height) * down)
        image = image.resize((width, height), Image.Resampling.LANCZOS, box=kept)
    pixels = np.asarray(image, dtype=np.float32)
    return torch.from_numpy(pixels / 127.5 - 1.0).permute(2, 0, 1).contiguous()
