"""Small copies of the pictures that samples on the page are about."""

import hashlib
import io
from collections.abc import Iterable
from functools import lru_cache

from cosmos_app.shown_samples import ShownSample
from cosmos_core.images import read_image

_LARGEST = 320  # pixels


def picture_name(reference: str) -> str:
    """Return what a picture is asked for by: no path of this machine is on the page."""
    return hashlib.sha256(reference.encode()).hexdigest()[:24]


def reference_named(name: str, samples: Iterable[ShownSample]) -> str | None:
    """Return the reference of a picture of these samples; of no other file is anything told."""
    references = (reference for sample in samples for reference in sample.images)
    return next((one for one in references if picture_name(one) == name), None)


@lru_cache(maxsize=64)
def thumbnail(reference: str) -> bytes:
    """Return a small JPEG of a picture.

    Raises:
        ImageError: if it cannot be read.
    """
    picture = read_image(reference)
    picture.thumbnail((_LARGEST, _LARGEST))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=85)
    return buffer.getvalue()
