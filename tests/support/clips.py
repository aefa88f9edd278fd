"""Small videos, written frame by frame."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt

Colour = tuple[int, int, int]


def write_clip(
    path: Path, colours: Sequence[Colour], *, fps: int = 4, size: tuple[int, int] = (32, 32)
) -> Path:
    """Write a video with one plain frame of each colour; ``size`` is width and height."""
    width, height = size
    frames = (np.full((height, width, 3), colour, dtype=np.uint8) for colour in colours)
    return write_frames(path, frames, fps=fps)


def write_frames(path: Path, frames: Iterable[npt.NDArray[np.uint8]], *, fps: int) -> Path:
    """Write a video of frames uint8[height, width, 3]."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.pix_fmt = "yuv420p"
        for number, pixels in enumerate(frames):
            if number == 0:
                stream.height, stream.width = pixels.shape[:2]
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path
