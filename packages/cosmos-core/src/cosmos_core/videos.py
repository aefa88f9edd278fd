"""Videos by reference: a text that any process can read, and the frames that it stands for.

A reference says where the video is and which of its frames are shown, so that whoever reads it,
the engine that samples or the policy that trains, sees the same:

    video:{"fps":2.0,"max_frames":64,"path":"/data/1.mp4"}
    video:{"fps":4.0,"frames":["/data/1.png","/data/2.png"]}

Frames are taken at equal distances from the first to the last, as Qwen's tools take them.
"""

import io
import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from cosmos_core.colours import name_matrix
from cosmos_core.containers import ContainerError, open_container
from cosmos_core.images import ImageError, MediaError, image_bytes, image_size, read_image
from cosmos_core.images import reference_of as image_reference

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame

_PREFIX = "video:"
_MIN_FRAMES = 4
_PAIR = 2  # models see two frames at a time
_ERRORS_SHOWN = 200
_LIST_FPS = 2.0


class VideoError(MediaError):
    """Raised for a video that cannot be read, or whose frames are asked for wrongly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSampling:
    """Which frames of a video are shown.

    Attributes:
        fps: frames a second.
        max_frames: at most so many, further apart if need be.
        start: of the section that is shown, in seconds.
        end: of the section, in seconds; ``None`` is the video's.
    """

    fps: float = 2.0
    max_frames: int = 64
    start: float = 0.0
    end: float | None = None

    def __post_init__(self) -> None:
        """Check that there is something to show.

        Raises:
            VideoError: if there is not.
        """
        end = float("inf") if self.end is None else self.end
        if self.fps <= 0 or self.max_frames < 1 or not 0 <= self.start < end:
            raise VideoError(
                "of a video are shown max_frames >= 1 at fps > 0 from 0 <= start < end, "
                f"found {self}"
            )

    def but(self, **says: object) -> "VideoSampling":
        """Return the sampling with what a row says of it.

        Raises:
            VideoError: if a value is none, or nothing would be shown.
        """
        for name, value in says.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise VideoError(f"a video's {name} is a number, found {value!r}")
        changed: dict[str, Any] = dict(says)
        return replace(self, **changed)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoInfo:
    """What is shown of a video, without its pixels.

    Attributes:
        height: of a frame as it is shown, in pixels.
        width: of a frame as it is shown, in pixels.
        indices: of the frames that are shown, among all of the video; a single one is shown twice,
            as models put two together.
        num_frames: of the section that they are taken from.
        fps: of the video.
    """

    height: int
    width: int
    indices: tuple[int, ...]
    num_frames: int
    fps: float

    def metadata(self) -> dict[str, Any]:
        """Return the same as transformers and vLLM have it (``VideoMetadata``)."""
        return {
            "fps": self.fps,
            "frames_indices": list(self.indices),
            "total_num_frames": self.num_frames,
            "duration": self.num_frames / self.fps,
            "height": self.height,
            "width": self.width,
            "video_backend": "pyav",
        }


def is_video(reference: str) -> bool:
    """Whether a reference is that of a video."""
    return reference.startswith(_PREFIX)


def video_reference(source: object, folder: Path, sampling: VideoSampling) -> str:
    """Return the reference of a video that a row names in one of several ways.

    Args:
        source: what `cosmos_core.images.reference_of` takes, of a video; a list of pictures, which
            are all shown, ``sampling.fps`` of them in a second; or a reference.
        folder: a path is relative to it.
        sampling: which frames are shown; a reference has its own.

    Raises:
        MediaError: if it is none of these, or lies behind a network.
    """
    if isinstance(source, str) and is_video(source):
        _parsed(source)
        return source
    if isinstance(source, list):
        frames = [image_reference(frame, folder) for frame in cast("list[object]", source)]
        if not frames:
            raise VideoError("a video is a list of no frames")
        return _text({"frames": frames, "fps": float(sampling.fps)})
    says: dict[str, Any] = {"fps": float(sampling.fps), "max_frames": int(sampling.max_frames)}
    section = {"start": sampling.start, "end": sampling.end}
    says |= {name: value for name, value in section.items() if value}
    return _text({"path": image_reference(source, folder), **says})


def video_sources(reference: str) -> tuple[str, ...]:
    """Return the files or ``data:`` URLs that a video is read from: one, or one a frame.

    Raises:
        VideoError: if it is no reference of a video.
    """
    says = _parsed(reference)
    return tuple(says["frames"]) if "frames" in says else (says["path"],)


def with_sources(reference: str, sources: Sequence[str]) -> str:
    """Return the reference of a video that lies elsewhere: see `video_sources`."""
    says = _parsed(reference)
    return _text(says | ({"frames": list(sources)} if "frames" in says else {"path": sources[0]}))


@lru_cache(maxsize=4096)
def video_info(reference: str) -> VideoInfo:
    """Return what is shown of a video; reads its packets and decodes one frame.

    Raises:
        MediaError: naming the reference, if there is no video that can be read.
    """
    says = _parsed(reference)
    if "frames" in says:
        return _info_of_frames(reference, says)
    with _opened(reference, says["path"]) as container:
        times = _times(container)
        stream = container.streams.video[0]
        fps = float(stream.average_rate or stream.guessed_rate or 0) or _LIST_FPS
        first, last = _section(says, fps, len(times))
        if last <= first:
            raise VideoError(
                f"{_short(reference)}: has {len(times)} frames at {fps:g} a second, and none in "
                "the section that is asked for"
            )
        height, width = _upright(next(_decoded(container))).shape[:2]
        return VideoInfo(
            height=height,
            width=width,
            indices=tuple(first + i for i in _evenly(last - first, fps, says)),
            num_frames=last - first,
            fps=fps,
        )


def read_video(reference: str) -> npt.NDArray[np.uint8]:
    """Return the frames that are shown of a video, uint8[T, height, width, 3], RGB and upright.

    In the place of a damaged frame is the one before it, as players have it.

    Raises:
        MediaError: naming the reference, if it cannot be read.
    """
    says = _parsed(reference)
    info = video_info(reference)
    if "frames" in says:
        return np.stack([np.asarray(read_image(says["frames"][index])) for index in info.indices])
    with _opened(reference, says["path"]) as container:
        times = _times(container)
        wanted = [times[index] for index in info.indices]
        container.seek(wanted[0], stream=container.streams.video[0])
        return _taken(_decoded(container), wanted, info)


def _taken(
    decoded: "Iterable[VideoFrame]", wanted: Sequence[int], info: VideoInfo
) -> npt.NDArray[np.uint8]:
    """Return the last frame that is shown by each of the times."""
    frames = np.empty((len(wanted), info.height, info.width, 3), dtype=np.uint8)
    place, before = 0, None
    for frame in decoded:
        time = cast("int", frame.pts)
        while place < len(wanted) and time >= wanted[place]:
            came = time == wanted[place]
            frames[place] = _upright(frame if came else before or frame)
            place += 1
        before = frame
        if place == len(wanted):
            return frames
    if before is None:
        raise StopIteration
    frames[place:] = _upright(before)
    return frames


def _info_of_frames(reference: str, says: Mapping[str, Any]) -> VideoInfo:
    sizes = [image_size(frame) for frame in says["frames"]]
    if len(set(sizes)) > 1:
        raise VideoError(f"{_short(reference)}: its frames are of several sizes: {set(sizes)}")
    height, width = sizes[0]
    return VideoInfo(
        height=height,
        width=width,
        indices=tuple(range(len(sizes))) if len(sizes) > 1 else (0,) * _PAIR,
        num_frames=len(sizes),
        fps=says["fps"],
    )


def _section(says: Mapping[str, Any], fps: float, total: int) -> tuple[int, int]:
    """Return the first frame of the section, and the one after the last."""
    first = round(says.get("start", 0.0) * fps)
    end = says.get("end")
    return first, total if end is None else min(total, round(end * fps) + 1)


def _evenly(total: int, fps: float, says: Mapping[str, Any]) -> list[int]:
    """Return which of so many frames are shown: pairs of them, the first and last among them."""
    wanted = total / fps * says["fps"]
    count = int(min(max(wanted, _MIN_FRAMES), says["max_frames"], total))
    if count < _PAIR:
        return [0] * _PAIR
    places = np.linspace(0, total - 1, count // _PAIR * _PAIR)
    return [round(float(place)) for place in places]


def _times(container: "InputContainer") -> list[int]:
    """Return when each frame is shown, in units of the stream, the earliest first."""
    stream = container.streams.video[0]
    shown = (packet for packet in container.demux(stream) if not packet.is_discard)
    times = [packet.pts for packet in shown if packet.pts is not None]
    container.seek(0)
    return sorted(times)


def _decoded(container: "InputContainer") -> "Generator[VideoFrame]":
    """Yield the frames from where the container is, but for damaged ones."""
    from av.error import InvalidDataError

    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    for packet in container.demux(stream):
        with suppress(InvalidDataError):
            yield from stream.decode(packet)


def _upright(frame: "VideoFrame") -> npt.NDArray[np.uint8]:
    name_matrix(frame)
    pixels = frame.to_ndarray(format="rgb24")
    turns = round(frame.rotation / 90) % 4
    return cast("npt.NDArray[np.uint8]", np.rot90(pixels, turns))


@contextmanager
def _opened(reference: str, source: str) -> "Generator[InputContainer]":
    """Open a video; what is wrong with it is a `VideoError` that names it."""
    try:
        from av.error import FFmpegError
    except ImportError as error:
        raise VideoError("reading videos needs 'pip install av'") from error
    try:
        data = io.BytesIO(image_bytes(source)) if source.startswith("data:") else source
    except ImageError as error:
        raise VideoError(str(error)) from error
    try:
        with open_container(data) as container:
            if not container.streams.video:
                raise VideoError(f"{_short(reference)}: has no moving pictures in it")
            yield container
    except FileNotFoundError as error:
        raise VideoError(f"cannot read the video {source}: {error.strerror}") from error
    except (FFmpegError, StopIteration, ContainerError) as error:
        raise VideoError(f"{_short(reference)} is no video that can be read: {error}") from error


def _parsed(reference: str) -> dict[str, Any]:
    try:
        says = json.loads(reference.removeprefix(_PREFIX))
    except json.JSONDecodeError:
        says = None
    has_source = isinstance(says, dict) and bool({"path", "frames"} & says.keys())
    if not is_video(reference) or not has_source:
        raise VideoError(f"no reference of a video: {reference[:_ERRORS_SHOWN]!r}")
    return cast("dict[str, Any]", says)


def _text(says: Mapping[str, Any]) -> str:
    return _PREFIX + json.dumps(says, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _short(reference: str) -> str:
    sources = video_sources(reference)
    name = sources[0] if len(sources[0]) < _ERRORS_SHOWN else f"{sources[0][:40]}..."
    return f"the video {name}" + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")
