"""Rows of a data set on disk: JSON lines, Parquet, or a directory of them or of HF datasets.

A row comes with the place it was read at, for errors. Files are read as they are needed; nothing
is copied or cached.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cosmos_parallel.errors import SftDataError

# Any: a row of a user's file, before it is looked at
Row = Mapping[str, Any]
_SUFFIXES = (".jsonl", ".json", ".parquet")
_FORMS = "files are JSON lines (one object in each line, not compressed) or .parquet"


def read_rows(path: Path, split: str = "train") -> Iterator[tuple[str, Row]]:
    """Yield each row of a data set with the place it is at.

    Args:
        path: a ``.parquet`` file; any other file is read as JSON lines; a directory written by
            ``datasets.save_to_disk``; or a directory with ``.jsonl`` and ``.parquet`` files in it,
            as repositories of the Hugging Face hub have.
        split: of a directory; files whose names do not begin with a split are taken when no
            file belongs to it.

    Raises:
        SftDataError: naming the file, and the line where there is one.
    """
    if not path.exists():
        raise SftDataError(f"cannot read SFT data {path}: No such file or directory")
    if path.is_file():
        yield from _file_rows(path)
    elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        yield from _saved_rows(path, split)
    else:
        for file in _files_of(path, split):
            yield from _file_rows(file)


def _file_rows(path: Path) -> Iterator[tuple[str, Row]]:
    return _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        with path.open(encoding="utf-8-sig") as lines:  # some write a mark in front
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", _parse(line, f"{path}:{number}")
    except OSError as error:
        raise SftDataError(f"cannot read SFT data {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SftDataError(f"SFT data {path} is not UTF-8 text: {error}; {_FORMS}") from error


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise SftDataError(f"{where}: is not JSON: {error}; {_FORMS}") from error
    if not isinstance(row, dict):
        raise SftDataError(f"{where}: is a JSON {type(row).__name__}; {_FORMS}")
    return row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    # Any: pyarrow has no type stubs
    import pyarrow
    import pyarrow.parquet as pq

    number = 0
    try:
        file: Any = pq.ParquetFile(path)
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path} row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise SftDataError(f"SFT data {path} cannot be read as Parquet: {error}") from error


def _saved_rows(path: Path, split: str) -> Iterator[tuple[str, Row]]:
    import datasets

    try:
        # Any: a Dataset, or a DatasetDict of them
        saved: Any = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever the library finds wrong with it
        raise SftDataError(f"SFT data {path} cannot be read: {error}") from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            there = ", ".join(sorted(map(str, saved)))
            raise SftDataError(f"SFT data {path} has no split {split!r}; it has {there}")
        saved = saved[split]
    for number, row in enumerate(saved, start=1):
        yield f"{path} row {number}", row


def _files_of(path: Path, split: str) -> list[Path]:
    files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES)
    known = {"train", "test", "validation", "valid", "dev", split}
    named = [file for file in files if _split_of(file, known) == split]
    chosen = named or [file for file in files if _split_of(file, known) is None]
    if not chosen:
        found = ", ".join(file.name for file in files[:5]) or "no .jsonl or .parquet file at all"
        raise SftDataError(f"SFT data {path} has no files of split {split!r} (found: {found})")
    return chosen


def _split_of(file: Path, known: set[str]) -> str | None:
    """Return the split that a file belongs to by its name or its folder's, if it says one."""
    for word in (file.name, file.parent.name):
        for split in known:
            if word == split or word.startswith((f"{split}-", f"{split}.", f"{split}_")):
                return split
    return None
