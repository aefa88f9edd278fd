"""Rows of prompts as a run keeps them: pictures and videos are files for all its processes."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from cosmos_app.errors import DataError
from cosmos_app.quickstart.arithmetic import Row
from cosmos_core.images import MediaError, image_bytes, image_size
from cosmos_core.media import media_beside, with_media
from cosmos_core.videos import (
    VideoSampling,
    is_video,
    video_info,
    video_sources,
    with_sources,
)
from cosmos_parallel import SftDataError, read_rows_in

_FIELDS = ("images", "image", "videos", "video")


def prompt_rows(
    path: Path, media: Path | None = None, sampling: VideoSampling | None = None
) -> Iterator[Row]:
    """Read rows of ``prompt`` or ``messages`` with ``answer`` and anything else.

    A row with pictures or videos becomes ``messages`` with marks, and ``images`` and ``videos``
    with one reference for each mark of their kind. All are looked at.

    Args:
        path: JSON lines, Parquet, or a directory of either or of a Hugging Face data set.
        media: folder for pictures and videos that lie in the rows themselves; ``None`` leaves them
            there.
        sampling: which frames are shown of videos whose rows do not say it.

    Raises:
        DataError: naming file, line and what is wrong.
    """
    empty = True
    for folder, where, row in _rows(path):
        empty = False
        if not {"prompt", "messages"} & row.keys():
            found = ", ".join(sorted(row)) or "nothing"
            raise DataError(f'{where}: want {{"prompt": ..., "answer": ...}}, found {found}')
        yield _with_files(row, where, folder, (media, sampling))
    if empty:
        raise DataError(f"data file {path}: it is empty")


def has_pictures(path: Path) -> bool:
    """Whether a file that a run keeps has a row with pictures or videos."""
    with path.open(encoding="utf-8") as lines:
        return any('"images": ["' in line or '"videos": ["' in line for line in lines)


def row_with_media_in(row: Row, media: Path) -> Row:
    """Return a row that a run keeps with those of its files that lie in a folder named there.

    Args:
        row: one of `prompt_rows`.
        media: the folder that it was given, wherever that is by now.
    """
    names = [name for name in ("images", "videos") if row.get(name)]
    return {**row, **{name: [_moved(one, media) for one in row[name]] for name in names}}


def _moved(reference: str, media: Path) -> str:
    if is_video(reference):
        return with_sources(reference, [_moved(one, media) for one in video_sources(reference)])
    if not Path(reference).is_absolute() or Path(reference).parent.name != media.name:
        return reference
    file = (media / Path(reference).name).absolute()
    return str(file) if file.exists() else reference


def most_videos(path: Path) -> int:
    """Return how many videos a row of a file that a run keeps has at most."""
    with path.open(encoding="utf-8") as lines:
        told = (json.loads(line) for line in lines if '"videos": ["' in line)
        return max((len(row.get("videos", ())) for row in told), default=0)


def _rows(path: Path) -> Iterator[tuple[Path, str, Row]]:
    """Yield rows with the folder that their paths start from, and the place they are at."""
    if not path.exists():
        raise DataError(f"data file {path}: no such file")
    if path.suffix == ".parquet" or path.is_dir():
        try:
            for folder, where, row in read_rows_in(path):
                yield folder, where, dict(row)
        except SftDataError as error:
            raise DataError(str(error)) from error
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield path.parent, where, _parsed(line, where)


def _parsed(line: bytes, where: str) -> Row:
    try:
        text = line.decode("utf-8-sig")  # some write a mark in front
        row = json.loads(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text: {error}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise DataError(
            f'{where}: want {{"prompt": ..., "answer": ...}}, found {text[:60].strip()}'
        )
    return cast("Row", row)


def _with_files(
    row: Row, where: str, folder: Path, kept: tuple[Path | None, VideoSampling | None]
) -> Row:
    """Return a row whose pictures and videos are files."""
    media, sampling = kept
    try:
        images, videos = media_beside(row, "images"), media_beside(row, "videos")
    except MediaError as error:
        raise DataError(f"{where}: {error}") from error
    messages = row.get("messages")
    if not images and not videos and not _has_parts(messages):
        return {name: value for name, value in row.items() if name not in _FIELDS}
    if messages is None:
        messages = [{"role": "user", "content": row["prompt"]}]
    try:
        turns, found = with_media(messages, images, videos, folder=folder, sampling=sampling)
        for reference in found:
            _ = video_info(reference) if is_video(reference) else image_size(reference)
        files = [_as_file(reference, media) for reference in found]
    except MediaError as error:
        raise DataError(f"{where}: {error}") from error
    taken = ("prompt", *_FIELDS)
    made = {name: value for name, value in row.items() if name not in taken}
    made["messages"] = list(turns)
    for name, wanted in (("images", False), ("videos", True)):
        of_kind = [file for file in files if is_video(file) == wanted]
        if of_kind:
            made[name] = of_kind
    return made


def _has_parts(messages: object) -> bool:
    turns = cast("Sequence[Any]", messages) if isinstance(messages, list) else ()
    return any(
        isinstance(turn, Mapping) and isinstance(turn.get("content"), list) for turn in turns
    )


def _as_file(reference: str, media: Path | None) -> str:
    """Write what lies in a reference itself to a file of its digest's name."""
    if media is None:
        return reference
    if is_video(reference):
        return with_sources(reference, [_as_file(one, media) for one in video_sources(reference)])
    if not reference.startswith("data:"):
        return reference
    data = image_bytes(reference)
    file = (media / hashlib.sha256(data).hexdigest()[:32]).absolute()
    if not file.exists():
        media.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_bytes(data)
        partial.replace(file)
    return str(file)
