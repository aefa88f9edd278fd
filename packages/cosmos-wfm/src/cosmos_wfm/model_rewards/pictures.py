"""Pictures of a request as vision models take them: resized, cut or padded, normalised."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate, pad

from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.reward_wire import RewardRequest
from cosmos_wfm.vocabularies import has_vocabulary

_OF_EXTRA = ("google.protobuf", "sentencepiece")
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def middle_frames(request: RewardRequest) -> Float[Tensor, "B 3 H W"]:
    """Return the pictures, of videos the frame in the middle, in [0, 1]."""
    pixels = request.pixels()
    return pixels[:, :, pixels.shape[2] // 2]


def resized(pictures: Float[Tensor, "B 3 H W"], height: int, width: int) -> Tensor:
    """Return pictures of another size, bicubic without aliases, rounded as 8 bits are."""
    scaled = interpolate(
        pictures, size=(height, width), mode="bicubic", align_corners=False, antialias=True
    )
    return (scaled * 255.0).round().clamp(0.0, 255.0) / 255.0


def cropped(pictures: Float[Tensor, "B 3 H W"], size: int) -> Float[Tensor, "B 3 S S"]:
    """Return the middle of pictures whose shorter side was brought to ``size``."""
    height, width = pictures.shape[-2:]
    if height <= width:
        pictures = resized(pictures, size, int(size * width / height))
    else:
        pictures = resized(pictures, int(size * height / width), size)
    top, left = (pictures.shape[-2] - size) // 2, (pictures.shape[-1] - size) // 2
    return pictures[..., top : top + size, left : left + size]


def padded(pictures: Float[Tensor, "B 3 H W"], size: int) -> Float[Tensor, "B 3 S S"]:
    """Return pictures whose longer side was brought to ``size``, black on both other sides."""
    height, width = pictures.shape[-2:]
    scale = size / max(height, width)
    pictures = resized(pictures, round(height * scale), round(width * scale))
    down, across = size - pictures.shape[-2], size - pictures.shape[-1]
    return pad(pictures, (across // 2, across - across // 2, down // 2, down - down // 2))


def normalised(
    pictures: Float[Tensor, "B 3 H W"],
    mean: tuple[float, ...] = CLIP_MEAN,
    std: tuple[float, ...] = CLIP_STD,
) -> Float[Tensor, "B 3 H W"]:
    """Return (pictures - mean) / std of each channel."""
    channels = (1, 3, 1, 1)
    return (pictures - torch.tensor(mean).view(channels)) / torch.tensor(std).view(channels)


def from_directory(model_class: Any, directory: str, reward: str) -> Any:
    """Load a model in float32, frozen and in evaluation mode, or its tokenizer, from there alone.

    Raises:
        WfmConfigError: if it cannot be read from there, or needs a library that is not there.
    """
    try:
        loaded = model_class.from_pretrained(directory, local_files_only=True)
    except (ImportError, OSError, ValueError) as error:
        raise WfmConfigError(
            f"{reward}: {directory} cannot be loaded: {str(error).strip()}{what_to_install()}"
        ) from error
    if isinstance(loaded, torch.nn.Module):
        # transformers left it in the type that it was saved in; heads and pictures are float32
        return loaded.float().requires_grad_(False).eval()
    if not has_vocabulary(Path(directory)):
        raise WfmConfigError(f"{reward}: {directory} has no vocabulary of its tokenizer")
    return loaded


def what_to_install(names: Sequence[str] = _OF_EXTRA) -> str:
    """Return what an error is to add if one of these libraries is not there, else nothing.

    Without SentencePiece, transformers says no more than that it cannot read a line of a file.
    """
    lacking = [name for name in names if not _can_import(name)]
    said = f"; {' and '.join(lacking)} not there: pip install 'cosmos-wfm[rewards]'"
    return said if lacking else ""


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
