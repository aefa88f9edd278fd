"""Small copies of the pictures and videos that samples on the page are about."""

import hashlib
import io
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from PIL import Image

from cosmos_app.shown_samples import ShownSample
from cosmos_core.images import read_image
from cosmos_core.videos import is_video, read_video

_LARGEST = 320  # pixels
_FRAMES = 4


def picture_name(reference: str) -> str:
    """Return what a picture is asked for by: no path of this machine is on the page."""
    return hashlib.sha256(reference.encode()).hexdigest()[:24]


def reference_named(name: str, samples: Iterable[ShownSample]) -> str | None:
    """Return the reference of a picture of these samples; of no other file is anything told."""
    references = (reference for sample in samples for reference in sample.images)
    return next((one for one in references if picture_name(one) == name), None)


@lru_cache(maxsize=64)
def thumbnail(reference: str) -> bytes:
    """Return a small JPEG of a picture; of a video some of its frames, one beside the other.

    Raises:
        MediaError: if it cannot be read.
    """
    picture = _strip(reference) if is_video(reference) else read_image(reference)
    picture.thumbnail((_LARGEST * (1 + is_video(reference)), _LARGEST))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=85)
    return buffer.getvalue()


def _strip(reference: str) -> Image.Image:
    frames = read_video(reference)
    shown = np.linspace(0, len(frames) - 1, min(len(frames), _FRAMES)).round().astype(int)
    return Image.fromarray(np.concatenate([frames[index] for index in shown], axis=1))
