"""Pictures and videos among messages: what a row of data says of them.

Rows name them in several ways; here each becomes a *reference*, a text that any process can read
(`cosmos_core.images`, `cosmos_core.videos`). Messages keep a mark in the place of each, which the
chat template turns into tokens.

    {"role": "user", "content": [{"type": "image", "image": "1.png"}, {"type": "text", ...}]}
        -> {"role": "user", "content": [{"type": "image"}, {"type": "text", ...}]}, ("/data/1.png",)
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from cosmos_core.images import MediaError, reference_of
from cosmos_core.videos import VideoSampling, video_reference

# Any: what a chat template takes, of which role and content are looked at
Message = dict[str, Any]
_IMAGE_NAMES = ("image", "path", "url", "image_url", "base64")
_VIDEO_NAMES = ("video", "path", "url", "video_url", "base64")
_KINDS = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}


def with_media(
    messages: Sequence[Mapping[str, Any]],
    images: Sequence[object] = (),
    videos: Sequence[object] = (),
    *,
    folder: Path,
    sampling: VideoSampling | None = None,
) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """Take pictures and videos out of a conversation.

    A message's content is a text, or a list of parts: ``{"type": "text", "text": ...}``,
    ``{"type": "image"}`` and ``{"type": "video"}``. A picture's source is under ``image``,
    ``path``, ``url``, ``image_url`` (as OpenAI has it) or ``base64``, a video's under ``video``,
    ``path``, ``url``, ``video_url`` or ``base64``; without a source a part takes the next of
    ``images`` or ``videos``. Those that no part asks for stand before the first user's text.

    A video's part may have ``fps``, ``max_frames``, ``video_start`` and ``video_end`` (seconds),
    as Qwen's tools know them; of a list of frames ``sample_fps`` says how fast they follow.

    Args:
        messages: role, content, and whatever else the chat template knows.
        images: the row's other pictures. A source is a path, a ``file:`` or ``data:`` URL, bytes,
            a dictionary of ``bytes`` and ``path`` as Parquet files have it, or a PIL image.
        videos: the row's other videos. A source is a path, URL, bytes or dictionary as above, a
            list of pictures, which are its frames, or a dictionary as a video's part.
        folder: paths are relative to it.
        sampling: which frames are shown of videos that do not say it themselves.

    Returns:
        Messages whose parts are texts and bare marks, and one reference for each mark, in order.

    Raises:
        MediaError: naming the message and the part.
    """
    sampling = sampling or VideoSampling()
    waiting = {
        "image": [reference_of(source, folder) for source in images],
        "video": [_row_video(source, folder, sampling) for source in videos],
    }
    found: list[str] = []
    plain: list[Message] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MediaError(f"message {number} is {type(message).__name__}, not a dictionary")
        content = message.get("content")
        if isinstance(content, list):
            parts = _parts(cast("list[object]", content), f"message {number}", folder, sampling)
            for part, source in parts:
                if part["type"] in waiting:
                    found.append(source or _next(waiting, part["type"], f"message {number}"))
            content = [part for part, _ in parts]
        plain.append({**message, "content": content})
    first = waiting["image"] + waiting["video"]
    if first:
        marks = [{"type": kind} for kind, left in waiting.items() for _ in left]
        _put_first(plain, marks)
        found = _in_front(plain, found, first)
    return tuple(plain), tuple(found)


def media_beside(row: Mapping[str, Any], field: str) -> list[object]:
    """Return the pictures of a row, or its videos, that stand beside its messages.

    Args:
        row: as it was read.
        field: that has them, one or a list. What stands under ``image`` or ``video`` is taken for
            ``images`` or ``videos``: data sets have either. A list under ``video`` is the frames
            of one.

    Raises:
        MediaError: if the row has both.
    """
    alone = field[:-1] if field in ("images", "videos") else ""
    several, one = row.get(field) or None, row.get(alone) or None
    if several is not None and one is not None:
        raise MediaError(f"has both {field!r} and {alone!r}; one list says them in order")
    given = several if one is None else one
    if isinstance(given, list) and (one is None or alone == "image"):
        return cast("list[object]", given)
    return [] if given is None else [given]


def text_of(content: object) -> str:
    """Return the text of a message's content; of several parts the texts, joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = cast("list[Mapping[str, Any]]", content)
    return "".join(part["text"] for part in parts if part.get("type") == "text")


def _row_video(source: object, folder: Path, sampling: VideoSampling) -> str:
    if isinstance(source, Mapping):
        named = cast("Mapping[str, Any]", source)
        if not named.get("bytes"):
            return _video(named, folder, sampling)
    return video_reference(source, folder, sampling)


def _parts(
    content: Sequence[object], where: str, folder: Path, sampling: VideoSampling
) -> list[tuple[Message, str]]:
    """Return each part as templates take it, and its reference where it has a source of its own."""
    found: list[tuple[Message, str]] = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise MediaError(f"{where}, part {number}: is {type(part).__name__}, not a dictionary")
        known = {
            key: value
            for key, value in cast("Mapping[str, Any]", part).items()
            if value or value == 0
        }
        kind: Any = known.get(
            "type", next((name for name in ("text", *_KINDS) if name in known), None)
        )
        if kind == "text":
            text = known.get("text", "")
            if not isinstance(text, str):
                raise MediaError(f"{where}, part {number}: its text is {type(text).__name__}")
            found.append(({"type": "text", "text": text}, ""))
        elif _KINDS.get(str(kind)) == "image":
            found.append(({"type": "image"}, _image(known, folder)))
        elif _KINDS.get(str(kind)) == "video":
            found.append(({"type": "video"}, _video(known, folder, sampling)))
        else:
            raise MediaError(
                f"{where}, part {number}: type {kind!r} is not known; parts are of type 'text', "
                "'image' or 'video'"
            )
    return found


def _image(part: Mapping[str, Any], folder: Path) -> str:
    source = _source(part, _IMAGE_NAMES)
    return "" if source is None else reference_of(source, folder)


def _video(part: Mapping[str, Any], folder: Path, sampling: VideoSampling) -> str:
    """Return the reference of a video with what its part says of its frames; empty without one."""
    source = _source(part, _VIDEO_NAMES)
    if source is None:
        return ""
    says = {
        name: part[key]
        for name, key in {
            "fps": "sample_fps" if isinstance(source, list) else "fps",
            "max_frames": "max_frames",
            "start": "video_start",
            "end": "video_end",
        }.items()
        if part.get(key) is not None
    }
    return video_reference(source, folder, sampling.but(**says))


def _source(part: Mapping[str, Any], names: Sequence[str]) -> object:
    name = next((name for name in names if part.get(name)), None)
    if name is None:
        return None
    return f"data:;base64,{part[name]}" if name == "base64" else part[name]


def _next(waiting: Mapping[str, list[str]], kind: str, where: str) -> str:
    if not waiting[kind]:
        named = "picture" if kind == "image" else "video"
        raise MediaError(f"{where}: has a {named} without a source, and the row has no further one")
    return waiting[kind].pop(0)


def _put_first(messages: list[Message], marks: Sequence[Message]) -> None:
    """Put marks before what the user says first."""
    at = next((i for i, message in enumerate(messages) if message.get("role") == "user"), None)
    if at is None:
        raise MediaError(
            f"{len(marks)} pictures or videos, and no message of the user to put them before"
        )
    content = messages[at]["content"]
    rest = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    messages[at] = {**messages[at], "content": [*marks, *cast("list[Message]", rest)]}


def _in_front(messages: list[Message], found: list[str], first: list[str]) -> list[str]:
    """Return references in the order of their marks: ``first`` stands where the user begins."""
    before = 0
    for message in messages:
        if message.get("role") == "user":
            break
        content = message.get("content")
        if isinstance(content, list):
            before += sum(part["type"] != "text" for part in cast("list[Message]", content))
    return [*found[:before], *first, *found[before:]]
