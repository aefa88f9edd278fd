"""Rows of a data set on disk: JSON lines, Parquet, or a directory of them or of HF datasets.

A row comes with the place it was read at, for errors. Files are read as they are needed; nothing
is copied or cached.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from cosmos_parallel.errors import SftDataError

# Any: a row of a user's file, before it is looked at
Row = Mapping[str, Any]
_SUFFIXES = (".jsonl", ".json", ".parquet")
_SAVED = ("dataset_dict.json", "state.json")
_BATCH_ROWS = 1000
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
    for _, where, row in read_rows_in(path, split):
        yield where, row


def read_rows_in(path: Path, split: str = "train") -> Iterator[tuple[Path, str, Row]]:
    """Yield what `read_rows` does, each with the directory that its file lies in.

    Raises:
        SftDataError: as `read_rows`.
    """
    if not path.exists():
        raise SftDataError(f"cannot read data {path}: No such file or directory")
    if path.is_dir() and any((path / name).is_file() for name in _SAVED):
        for where, row in _saved_rows(path, split):
            yield path, where, row
        return
    for file in [path] if path.is_file() else _files_of(path, split):
        for where, row in _file_rows(file):
            yield file.parent, where, row


def _file_rows(path: Path) -> Iterator[tuple[str, Row]]:
    return _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        with path.open(encoding="utf-8-sig") as lines:  # some write a mark in front
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", _parse(line, f"{path}:{number}")
    except OSError as error:
        raise SftDataError(f"cannot read data {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SftDataError(f"data {path} is not UTF-8 text: {error}; {_FORMS}") from error


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # nesting beyond measure
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
                yield f"{path} row {number}", _without_absent(row, row)
    except (OSError, pyarrow.ArrowException) as error:
        raise SftDataError(f"data {path} cannot be read as Parquet: {error}") from error


def _saved_rows(path: Path, split: str) -> Iterator[tuple[str, Row]]:
    import datasets

    try:
        # Any: a Dataset, or a DatasetDict of them
        saved: Any = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever the library finds wrong with it
        raise SftDataError(f"data {path} cannot be read: {error}") from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            there = ", ".join(sorted(map(str, saved)))
            raise SftDataError(f"data {path} has no split {split!r}; it has {there}")
        saved = saved[split]
    # pictures and videos stay bytes and paths: opening all would take time and memory
    features: Any = datasets.Features(_undecoded(dict(saved.features)))
    number = 0
    for batch in saved.with_format("arrow").iter(_BATCH_ROWS):
        for row in batch.to_pylist():
            number += 1
            yield f"{path} row {number}", _without_absent(row, features.decode_example(row))


def _without_absent(stored: Row, row: Row) -> Row:
    """Return a row of a table without what only other rows have in messages and tools.

    A table has one form for all rows: each call of a tool has the arguments of every tool there,
    and each schema the properties of every other, null where they are none of its own.

    Args:
        stored: as it is in the table, where a value of JSON is a text: its nulls were written.
        row: the same, decoded.
    """
    return {
        name: _present(stored[name], value) if name == "tools" or _is_chat(value) else value
        for name, value in row.items()
    }


def _is_chat(value: object) -> bool:
    turns = cast("list[object]", value) if isinstance(value, list) else []
    return bool(turns) and all(isinstance(turn, dict) and "role" in turn for turn in turns)


def _present(stored: Any, value: Any) -> Any:  # trees of dictionaries and lists
    if isinstance(stored, list):
        return [_present(*pair) for pair in zip(cast("list[Any]", stored), value, strict=True)]
    if not isinstance(stored, dict):
        return value
    # templates read the content of every message, also of one that only calls tools
    kept = {"content"} if "role" in stored else set[str]()
    named = cast("dict[str, Any]", stored).items()
    return {name: _present(v, value[name]) for name, v in named if v is not None or name in kept}


def _undecoded(feature: Any) -> Any:  # of datasets: a tree of dictionaries, lists and features
    """Return the features of a data set whose pictures and videos are not opened."""
    import datasets

    if isinstance(feature, dict):
        named = cast("dict[str, Any]", feature)
        return {name: _undecoded(inner) for name, inner in named.items()}
    if isinstance(feature, list):
        return [_undecoded(inner) for inner in cast("list[Any]", feature)]
    if isinstance(feature, datasets.Image | datasets.Video):
        return replace(feature, decode=False)
    if hasattr(feature, "feature"):
        return replace(feature, feature=_undecoded(feature.feature))
    return feature


def _files_of(path: Path, split: str) -> list[Path]:
    files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES)
    known = {"train", "test", "validation", "valid", "dev", split}
    named = [file for file in files if _split_of(file, known) == split]
    chosen = named or [file for file in files if _split_of(file, known) is None]
    if not chosen:
        found = ", ".join(file.name for file in files[:5]) or "no .jsonl or .parquet file at all"
        raise SftDataError(f"data {path} has no files of split {split!r} (found: {found})")
    return chosen


def _split_of(file: Path, known: set[str]) -> str | None:
    """Return the split that a file belongs to by its name or its folder's, if it says one."""
    for word in (file.name, file.parent.name):
        for split in sorted(known, key=len, reverse=True):  # train_sft is none of train
            if word == split or word.startswith((f"{split}-", f"{split}.", f"{split}_")):
                return split
    return None
