"""Directories of videos with captions: pairs side by side, and Cosmos's own layout.

<path>/0001.json  {"prompt": ...}         <path>/metas/0001.txt   the prompt
<path>/0001.mp4                           <path>/videos/0001.mp4
"""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from cosmos_wfm.caption_data import BrokenPolicy, CaptionedFiles, CaptionedImage
from cosmos_wfm.captions import fit_sizes
from cosmos_wfm.errors import CaptionDataError
from cosmos_wfm.ranges import check_at_least

_TURNS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}
"""Degrees against the clock, as PyAV and PIL count them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoCaptionsConfig:
    """Where the videos are, and which part of each is taken.

    Attributes:
        path: directory of ``<name>.json`` beside ``<name>.mp4``, or with ``metas`` and ``videos``.
        frames: of a sample, the first ones of its video.
        height: of a sample, in pixels.
        width: of a sample, in pixels.
        buckets: sizes [height, width], of which each video gets the one nearest in shape; empty
            gives all videos the one above.
        max_enlargement: largest factor by which a video may be scaled up to that size; one that is
            smaller is broken. 0 takes every video.
        broken: what to do with a video that has no caption, no video, too few frames, a wrong size
            or cannot be decoded: ``fatal`` refuses it, ``skip`` leaves it out and counts it.
    """

    kind: Literal["videos"] = "videos"
    path: str
    frames: int = 81
    height: int = 480
    width: int = 832
    buckets: tuple[tuple[int, int], ...] = ()
    max_enlargement: float = 0.0
    broken: BrokenPolicy = "fatal"

    def __post_init__(self) -> None:
        """Check the ranges; sizes are held against the model.

        Raises:
            WfmConfigError: names the field that is out of range.
        """
        check_at_least("data", self, max_enlargement=0)

    def build(self) -> "VideoCaptions":
        """Open the directory and look at every video's first frames.

        Raises:
            CaptionDataError: if there is no usable pair in it, or a broken one that is fatal.
        """
        return VideoCaptions(self)


class VideoCaptions(CaptionedFiles):
    """The videos of a directory, in order of their names: the first frames of each."""

    def __init__(self, config: VideoCaptionsConfig) -> None:
        """Match captions and videos, and ask each video for its length.

        Raises:
            CaptionDataError: see ``VideoCaptionsConfig.build``.
        """
        root = Path(config.path)
        super().__init__(root, config.broken)
        self._config = config
        for name, caption, video in _candidates(root):
            try:
                self._pairs.append((_usable_pair(caption, video, config.frames), video))
            except CaptionDataError as error:
                self.problems.add(f"{name}: {error}")
        self.problems.refuse()
        if not self._pairs:
            raise CaptionDataError(
                f"{root} has no usable video: neither <name>.json beside <name>.mp4 nor "
                f"metas/<name>.txt and videos/<name>.mp4 ({len(self.problems)} left out)"
            )

    def _decoded(self, prompt: str, path: Path) -> CaptionedImage:
        config = self._config
        frames = read_frames(path, config.frames, name=path.name)
        if len(frames) < config.frames:
            raise CaptionDataError(f"{path} has {len(frames)} frames; {config.frames} are needed")
        pixels = [fit_sizes(frame, config, name=str(path)) for frame in frames]
        return CaptionedImage(prompt, torch.stack(pixels, dim=1))


def read_frames(source: Path | BinaryIO, most: int, *, name: str) -> list[Image.Image]:
    """Return the first frames of a video, upright, as PIL images; fewer if it is shorter.

    Args:
        source: a file, or its bytes as a stream.
        most: frames to read.
        name: of the video, for errors.

    Raises:
        CaptionDataError: if it cannot be decoded.
    """
    av: Any = importlib.import_module("av")
    try:
        with av.open(str(source) if isinstance(source, Path) else source) as container:
            found: list[Image.Image] = []
            for frame in container.decode(video=0):
                found.append(_upright(frame))
                if len(found) == most:
                    break
            return found
    except (av.error.FFmpegError, IndexError, OSError, ValueError) as error:
        raise CaptionDataError(f"{name} cannot be decoded: {error}") from error


def _upright(frame: Any) -> Image.Image:
    """Return a frame turned as its file says that it is shown: cameras are held both ways."""
    image: Image.Image = frame.to_image()
    turn = _TURNS.get(round(frame.rotation) % 360)
    return image if turn is None else image.transpose(turn)


def write_video(path: Path, pixels: Float[Tensor, "3 F H W"], *, fps: int = 16) -> None:
    """Write pixels in [-1, 1] as MPEG-4.

    Args:
        path: of the file, ending in ``.mp4``.
        pixels: even height and width.
        fps: frames per second.
    """
    av: Any = importlib.import_module("av")
    scaled = ((pixels.clamp(-1.0, 1.0) + 1.0) * 127.5).round()
    array = scaled.permute(1, 2, 3, 0).cpu().numpy().astype(np.uint8)
    with av.open(str(path), mode="w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.height, stream.width = array.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in array:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def _candidates(root: Path) -> list[tuple[str, Path, Path]]:
    """Return name, caption and video of everything that has either, by name."""
    if (root / "metas").is_dir() or (root / "videos").is_dir():
        captions, videos, suffix = root / "metas", root / "videos", ".txt"
    else:
        captions, videos, suffix = root, root, ".json"
    names = {path.stem for path in captions.glob(f"*{suffix}")}
    names |= {path.stem for path in videos.glob("*.mp4")}
    return [(n, captions / f"{n}{suffix}", videos / f"{n}.mp4") for n in sorted(names)]


def _usable_pair(caption: Path, video: Path, frames: int) -> str:
    """Return the prompt of a pair.

    Raises:
        CaptionDataError: says what is wrong with it.
    """
    for path in (caption, video):
        if not path.is_file():
            raise CaptionDataError(f"there is no {path.parent.name}/{path.name}")
    try:
        text: object = caption.read_text(encoding="utf-8-sig")
        if caption.suffix == ".json":
            text = json.loads(str(text))["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise CaptionDataError(f"no prompt in {caption.name} ({error!r})") from error
    if not isinstance(text, str):
        raise CaptionDataError(f"prompt in {caption.name} is {type(text).__name__}, not text")
    found = len(read_frames(video, frames, name=video.name))
    if found < frames:
        raise CaptionDataError(f"{found} frames in {video.name}; {frames} are needed")
    return text.strip()
