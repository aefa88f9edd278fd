"""Rows of prompts as a run keeps them: every picture a file that all its processes can read."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from cosmos_app.errors import DataError
from cosmos_app.quickstart.arithmetic import Row
from cosmos_core.images import image_bytes, image_size
from cosmos_core.media import MediaError, with_media
from cosmos_parallel import SftDataError, read_rows_in


def prompt_rows(path: Path, pictures: Path | None = None) -> Iterator[Row]:
    """Read rows of ``prompt`` or ``messages`` with ``answer`` and anything else.

    A row with pictures becomes ``messages`` with marks and ``images`` with one absolute path for
    each mark. All pictures are looked at.

    Args:
        path: JSON lines, Parquet, or a directory of either or of a Hugging Face data set.
        pictures: folder for pictures that lie in the rows themselves; ``None`` leaves them there.

    Raises:
        DataError: naming file, line and what is wrong.
    """
    empty = True
    for folder, where, row in _rows(path):
        empty = False
        if not {"prompt", "messages"} & row.keys():
            found = ", ".join(sorted(row)) or "nothing"
            raise DataError(f'{where}: want {{"prompt": ..., "answer": ...}}, found {found}')
        yield _with_pictures(row, where, folder, pictures)
    if empty:
        raise DataError(f"data file {path}: it is empty")


def has_pictures(path: Path) -> bool:
    """Whether a file that a run keeps has a row with pictures."""
    with path.open(encoding="utf-8") as lines:
        return any('"images": ["' in line for line in lines)


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


def _with_pictures(row: Row, where: str, folder: Path, pictures: Path | None) -> Row:
    """Return a row whose pictures are files."""
    images = row.get("images")
    if images is None and row.get("image") is not None:
        images = [row["image"]]
    messages = row.get("messages")
    if not images and not _has_parts(messages):
        return {name: value for name, value in row.items() if name not in ("images", "image")}
    if not isinstance(images or [], list):
        raise DataError(f"{where}: field 'images' is {type(images).__name__}, not a list")
    if messages is None:
        messages = [{"role": "user", "content": row["prompt"]}]
    try:
        turns, found = with_media(messages, images or [], folder=folder)
        for reference in found:
            image_size(reference)
        kept = [_as_file(reference, pictures) for reference in found]
    except MediaError as error:
        raise DataError(f"{where}: {error}") from error
    rest = {name: value for name, value in row.items() if name not in ("prompt", "image")}
    return {**rest, "messages": list(turns), "images": kept}


def _has_parts(messages: object) -> bool:
    turns = cast("Sequence[Any]", messages) if isinstance(messages, list) else ()
    return any(
        isinstance(turn, Mapping) and isinstance(turn.get("content"), list) for turn in turns
    )


def _as_file(reference: str, pictures: Path | None) -> str:
    """Write a picture that lies in its reference to a file of its digest's name."""
    if pictures is None or not reference.startswith("data:"):
        return reference
    data = image_bytes(reference)
    file = (pictures / hashlib.sha256(data).hexdigest()[:32]).absolute()
    if not file.exists():
        pictures.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_bytes(data)
        partial.replace(file)
    return str(file)
