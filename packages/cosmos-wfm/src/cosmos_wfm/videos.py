"""Directories of videos with captions: pairs side by side, and Cosmos's own layout.

<path>/0001.json  {"prompt": ...}         <path>/metas/0001.txt   the prompt
<path>/0001.mp4                           <path>/videos/0001.mp4
"""

import importlib
import math
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from cosmos_core.containers import open_container
from cosmos_wfm.caption_data import (
    CAPTION_SUFFIXES,
    BrokenPolicy,
    CaptionedFiles,
    CaptionedImage,
    files_by_stem,
    of_suffix,
    read_caption,
)
from cosmos_wfm.captions import Sizes, fit_sizes
from cosmos_wfm.errors import CaptionDataError
from cosmos_wfm.ranges import check_at_least
from cosmos_wfm.video_colours import standard_colours

VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm")
_Frame = TypeVar("_Frame")
_WIDEST_PIXEL = 4.0
_BT709, _LIMITED = 1, 1
"""Numbers of ITU-T H.273 and of FFmpeg's ranges, as PyAV takes them."""
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
        path: directory of ``<name>.json`` or ``<name>.txt`` beside ``<name>.mp4`` (or mov, mkv,
            webm), or with ``metas`` and ``videos``; in folders of it as well.
        frames: of a sample, the first ones of its video; 1 makes it a picture.
        fps: frames of a second of a sample, whatever its video has: for each moment the frame
            nearest in time, so that of a faster video some are left out, and some of a slower one
            repeated. 0 takes every frame: what was filmed at 60 a second is slow motion at 16.
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
    fps: float = 0.0
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
        check_at_least("data", self, max_enlargement=0, fps=0)

    def build(self) -> "VideoCaptions":
        """Open the directory and ask every video for its length; none is decoded.

        Raises:
            CaptionDataError: if there is no usable pair in it, or a broken one that is fatal.
        """
        return VideoCaptions(self)


class VideoCaptions(CaptionedFiles):
    """The videos of a directory and its folders, in order of names: the first frames of each."""

    def __init__(self, config: VideoCaptionsConfig) -> None:
        """Match captions and videos, and ask each video for its length.

        Raises:
            CaptionDataError: see ``VideoCaptionsConfig.build``.
        """
        root = Path(config.path)
        super().__init__(root, config.broken)
        self._config = config
        for name, pair in _candidates(root):
            try:
                self._pairs.append(_usable_pair(pair, config))
            except CaptionDataError as error:
                self.problems.add(f"{name}: {error}")
        self.problems.refuse()
        if not self._pairs:
            raise CaptionDataError(
                f"{root} has no usable video: neither <name>.json or .txt beside <name>.mp4 nor "
                f"metas/<name>.txt and videos/<name>.mp4 ({len(self.problems)} left out)"
            )

    def _decoded(self, prompt: str, path: Path) -> CaptionedImage:
        pixels = read_clip(path, self._config, name=str(path))
        return CaptionedImage(prompt, pixels if self._config.frames > 1 else pixels[:, 0])


class ClipSizes(Sizes, Protocol):
    """The part of a data config that says which frames a sample has, and how large."""

    @property
    def frames(self) -> int:
        """How many."""
        ...

    @property
    def fps(self) -> float:
        """Of a second; 0 for those of the file."""
        ...


def read_clip(source: Path | BinaryIO, sizes: ClipSizes, *, name: str) -> Float[Tensor, "3 F H W"]:
    """Return the first frames of a video in the size that they are made.

    Raises:
        CaptionDataError: says under ``name`` that it cannot be decoded, is too short or too small.
    """
    frames = islice(_frames(source, sizes.fps, name=name), sizes.frames)
    pixels = [fit_sizes(frame, sizes, name=name) for frame in frames]
    if len(pixels) < sizes.frames:
        raise CaptionDataError(_too_short(name, len(pixels), sizes))
    return torch.stack(pixels, dim=1)


def read_frames(
    source: Path | BinaryIO, most: int, *, name: str, fps: float = 0.0
) -> list[Image.Image]:
    """Return the first frames of a video, upright, as PIL images; fewer if it is shorter.

    Args:
        source: a file, or its bytes as a stream.
        most: frames to read.
        name: of the video, for errors.
        fps: of a second; 0 for those of the file.

    Raises:
        CaptionDataError: if it cannot be decoded.
    """
    return list(islice(_frames(source, fps, name=name), most))


def _frames(source: Path | BinaryIO, fps: float, *, name: str) -> Generator[Image.Image]:
    """Yield the frames of a video, upright, decoded as they are asked for."""
    av: Any = importlib.import_module("av")
    try:
        with open_container(str(source) if isinstance(source, Path) else source) as container:
            aspect = float(container.streams.video[0].sample_aspect_ratio or 1)
            decoded: Iterable[Any] = container.decode(video=0)
            if fps:
                decoded = resampled(((frame.time, frame) for frame in decoded), fps)
            for frame in decoded:
                yield _as_shown(frame, aspect)
    except (av.error.FFmpegError, IndexError, OSError, ValueError) as error:
        raise CaptionDataError(f"{name} cannot be decoded: {error}") from error


def resampled(timed: Iterable[tuple[float | None, _Frame]], fps: float) -> Iterator[_Frame]:
    """Yield for 0, 1 / fps, 2 / fps, ... seconds after the first frame the one nearest in time.

    Nearest, not last before: times are rounded in many files, to milliseconds in some. The last
    frame is shown for half as long as the one before it.

    Args:
        timed: frames and when each is shown, in seconds, in order.
        fps: moments of a second.

    Raises:
        ValueError: if a frame has no time.
    """
    number, first, before, gap = 0, 0.0, 0.0, 0.0
    shown: list[_Frame] = []  # the frame before, if there is one
    for time, frame in timed:
        if time is None:
            raise ValueError("a frame has no time, which data.fps needs")
        if not shown:
            first = before = time
        gap = time - before
        while shown and first + number / fps < before + gap / 2:
            yield shown[0]
            number += 1
        shown, before = [frame], time
    while shown and first + number / fps <= before + gap / 2:
        yield shown[0]
        number += 1


def _num_frames(video: Path, sizes: ClipSizes) -> int:
    """Return how many frames a sample of a video would have, at most as many as are wanted.

    By its packets, of which none is decoded: that takes a hundredth of the time.

    Raises:
        CaptionDataError: if it is no video.
    """
    av: Any = importlib.import_module("av")
    length_s = sizes.frames / sizes.fps + 1.0 if sizes.fps else math.inf
    most = sizes.frames if not sizes.fps else math.inf
    times: list[float | None] = []
    try:
        with open_container(str(video)) as container:
            stream: Any = container.streams.video[0]  # its time base is there in containers
            for packet in container.demux(stream):
                if not packet.size or packet.is_discard:
                    continue
                times.append(None if packet.pts is None else float(packet.pts * stream.time_base))
                if len(times) >= most or (times[-1] or 0.0) - (times[0] or 0.0) > length_s:
                    break
    except (av.error.FFmpegError, IndexError, OSError, ValueError) as error:
        raise CaptionDataError(f"{video.name} cannot be decoded: {error}") from error
    if not sizes.fps or None in times:  # without times, whoever decodes it says so
        return min(len(times), sizes.frames)
    ordered = sorted(time for time in times if time is not None)
    return len(list(islice(resampled(((t, t) for t in ordered), sizes.fps), sizes.frames)))


def _too_short(name: str, found: int, sizes: ClipSizes) -> str:
    rate = f" at {sizes.fps:g} a second" if sizes.fps else ""
    return f"{name} has {found} frames{rate}; {sizes.frames} are needed"


def _as_shown(frame: Any, aspect: float) -> Image.Image:
    """Return a frame as its file says that it is shown.

    Args:
        frame: of PyAV.
        aspect: width of a pixel for its height, which is not 1 in much of what was filmed for
            television; one that no camera has is a mistake and passed over.
    """
    image = standard_colours(frame)
    if aspect != 1 and 1 / _WIDEST_PIXEL <= aspect <= _WIDEST_PIXEL:
        size = (max(1, round(image.width * aspect)), image.height)
        image = image.resize(size, Image.Resampling.LANCZOS)
    turn = _TURNS.get(round(frame.rotation) % 360)  # cameras are held both ways
    return image if turn is None else image.transpose(turn)


def write_video(path: Path, pixels: Float[Tensor, "3 F H W"], *, fps: int = 16) -> None:
    """Write pixels in [-1, 1] as H.264, which browsers show, or where PyAV has none as MPEG-4.

    Colours are stored as BT.709 and said to be, since players guess those of a file that does not
    say by its size.

    Args:
        path: of the file, ending in ``.mp4``.
        pixels: even height and width.
        fps: frames per second.
    """
    av: Any = importlib.import_module("av")
    scaled = ((pixels.clamp(-1.0, 1.0) + 1.0) * 127.5).round()
    array = scaled.permute(1, 2, 3, 0).cpu().numpy().astype(np.uint8)
    with av.open(str(path), mode="w") as container:
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = array.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.colorspace = stream.codec_context.color_primaries = _BT709
        stream.codec_context.color_trc, stream.codec_context.color_range = _BT709, _LIMITED
        for image in array:
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            stored = frame.reformat(format="yuv420p", dst_colorspace=_BT709)
            for packet in stream.encode(stored):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


_Pair = tuple[list[Path], list[Path], tuple[Path, Path]]
"""Captions and videos of a name, and how they are called if there is none."""


def _candidates(root: Path) -> list[tuple[str, _Pair]]:
    """Return captions and videos of every name that has a video or could have one."""
    texts, clips, suffix = root, root, ".json"
    if (root / "metas").is_dir():
        texts, clips, suffix = root / "metas", root / "videos", ".txt"
    captions, videos = ({} if not d.is_dir() else files_by_stem(d) for d in (texts, clips))
    found: list[tuple[str, _Pair]] = []
    for name in sorted(set(captions) | set(videos)):
        shown = of_suffix(videos.get(name, ()), VIDEO_SUFFIXES)
        own = of_suffix(captions.get(name, ()), CAPTION_SUFFIXES if shown else (suffix,))
        if own or shown:
            found.append((name, (own, shown, (texts / f"{name}{suffix}", clips / f"{name}.mp4"))))
    return found


def _usable_pair(pair: _Pair, sizes: ClipSizes) -> tuple[str, Path]:
    """Return prompt and video of a pair.

    Raises:
        CaptionDataError: says what is wrong with it.
    """
    for files, usual in zip(pair[:2], pair[2], strict=True):
        if not files:
            raise CaptionDataError(f"there is no {usual.parent.name}/{usual.name}")
    if len(pair[1]) > 1:
        raise CaptionDataError(f"{len(pair[1])} videos of that name, 1 is needed")
    prompt, video = read_caption(pair[0], name=pair[0][0].name), pair[1][0]
    if (found := _num_frames(video, sizes)) < sizes.frames:
        raise CaptionDataError(_too_short(video.name, found, sizes))
    return prompt.strip(), video
