"""Small videos of plain frames."""

from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np

Colour = tuple[int, int, int]


def write_clip(
    path: Path, colours: Sequence[Colour], *, fps: int = 4, size: tuple[int, int] = (32, 32)
) -> Path:
    """Write a video with one plain frame of each colour; ``size`` is width and height."""
    width, height = size
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps, options={"qscale": "2"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for colour in colours:
            pixels = np.full((height, width, 3), colour, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path
