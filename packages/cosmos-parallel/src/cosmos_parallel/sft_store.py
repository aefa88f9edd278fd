"""Encoded examples on disk: made once, by processes side by side, and mapped by every rank.

::

    FOLDER/tokens.bin     int32[N], all examples one after another
    FOLDER/trainable.bin  bool[N]
    FOLDER/index.npz      lengths int64[E] of examples, row_sizes int64[R] of rows in examples
    FOLDER/about.json     what it was made of, how many rows were too long, pictures
"""

import hashlib
import json
import multiprocessing
import shutil
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cosmos_parallel.errors import SftDataError
from cosmos_parallel.pictures import PictureReader
from cosmos_parallel.sft_data import SftFormat, encode_rows, require_examples
from cosmos_parallel.sft_examples import SftData, SftExample
from cosmos_parallel.sft_rows import Row, read_rows_in

_FORM = 1
_CHUNK_ROWS = 256
_AHEAD = 4
_LONGEST_S = 1800.0
_OF_TOKENIZERS = {".json", ".jinja", ".model", ".tiktoken", ".txt"}

_Chunk = list[tuple[Path, str, Row]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoders:
    """Which processes encode a data set.

    Attributes:
        processes: started for it; below 2 the one that asks does it all.
        alone: so many rows are encoded by the one that asks before any is started.
    """

    processes: int = 1
    alone: int = 2048


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Examples of some rows, joined; pictures by the place of their example."""

    tokens: npt.NDArray[np.int32]
    trainable: npt.NDArray[np.bool_]
    lengths: list[int]
    row_sizes: tuple[int, ...]
    images: dict[int, tuple[tuple[str, ...], str]]
    num_dropped: int
    num_rows: int


def store_sft_data(
    folder: Path,
    path: Path,
    model: Path,
    rows: SftFormat,
    *,
    encoders: Encoders | None = None,
    told: Callable[[int], None] | None = None,
) -> None:
    """Encode a data set into a folder, whole or not at all; what was there is replaced.

    Args:
        folder: where it goes.
        path: of the data; see `read_rows`.
        model: directory with the tokenizer, and what shows pictures if it sees.
        rows: which fields hold what.
        encoders: which processes do it; this one alone when ``None``.
        told: called now and then with how many rows are done.

    Raises:
        SftDataError: as `load_sft_data`, and if a process that encodes dies.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        made_of = _made_of(path, model, rows)
        parts = _encode(path, model, rows, encoders or Encoders())
        num_dropped, num_examples = _write(partial, parts, made_of, told or (lambda _: None))
        require_examples(path, rows, num_examples, num_dropped)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def stored_sft_data(folder: Path, path: Path, model: Path, rows: SftFormat) -> SftData | None:
    """Return what `store_sft_data` made of the same data, model and rows; ``None`` if it did not.

    Token ids stay in files, which the processes of a machine share.
    """
    if not is_stored(folder, path, model, rows):
        return None
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    tokens = np.asarray(np.memmap(folder / "tokens.bin", np.int32, "r"))
    trainable = np.asarray(np.memmap(folder / "trainable.bin", np.bool_, "r"))
    with np.load(folder / "index.npz") as index:
        ends, row_sizes = np.cumsum(index["lengths"]).tolist(), index["row_sizes"].tolist()
    images = {int(place): (tuple(found), name) for place, found, name in about["images"]}
    none = ((), "")
    examples: list[SftExample] = []
    for place, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        seen, name = images.get(place, none)
        part = slice(begin, end)
        examples.append(
            SftExample(
                token_ids=tokens[part], trainable=trainable[part], images=tuple(seen), name=name
            )
        )
    return SftData(
        examples=tuple(examples),
        num_dropped=about["num_dropped"],
        reader=PictureReader.of(model),
        row_sizes=tuple(row_sizes),
    )


def is_stored(folder: Path, path: Path, model: Path, rows: SftFormat) -> bool:
    """Whether a folder has a data set as it would be encoded now."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        return about["made_of"] == json.loads(json.dumps(_made_of(path, model, rows)))
    except (OSError, ValueError, KeyError):
        return False


def _made_of(path: Path, model: Path, rows: SftFormat) -> dict[str, Any]:
    """Return what an encoded data set depends on; files of data by size and time."""
    import transformers

    files = [path] if path.is_file() else sorted(path.rglob("*"))
    stats = [(str(file.absolute()), file.stat()) for file in files if file.is_file()]
    tokenizer = hashlib.sha256()
    for file in sorted(model.iterdir()):
        if file.suffix in _OF_TOKENIZERS:
            tokenizer.update(file.name.encode() + file.read_bytes())
    return {
        "form": _FORM,
        "versions": [version("cosmos-parallel"), transformers.__version__],
        "data": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        "tokenizer": tokenizer.hexdigest(),
        "rows": asdict(rows),
    }


def _write(
    folder: Path, parts: Iterable[_Encoded], made_of: object, told: Callable[[int], None]
) -> tuple[int, int]:
    """Write all files; return how many examples were too long, and how many there are."""
    lengths, row_sizes, images = list[int](), list[int](), list[tuple[int, Sequence[str], str]]()
    num_dropped = num_rows = 0
    with (
        (folder / "tokens.bin").open("wb") as tokens,
        (folder / "trainable.bin").open("wb") as marks,
    ):
        for part in parts:
            tokens.write(part.tokens.tobytes())
            marks.write(part.trainable.tobytes())
            images += [(len(lengths) + at, *found) for at, found in part.images.items()]
            lengths += part.lengths
            row_sizes += part.row_sizes
            num_dropped += part.num_dropped
            num_rows += part.num_rows
            told(num_rows)
    np.savez(folder / "index.npz", lengths=np.array(lengths), row_sizes=np.array(row_sizes))
    about = {"made_of": made_of, "num_dropped": num_dropped, "images": images}
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")
    return num_dropped, len(lengths)


def _encode(path: Path, model: Path, rows: SftFormat, encoders: Encoders) -> Iterator[_Encoded]:
    """Yield the examples of a data set in order; other processes encode from some row on."""
    processes = encoders.processes
    left = read_rows_in(path, rows.split)
    encoder = _Encoder(model, rows)
    for chunk in _chunks(islice(left, encoders.alone)):
        yield encoder(chunk)
    rest = _chunks(left)
    if processes < 2 or (first := next(rest, None)) is None:
        yield from map(encoder, rest)
        return
    with ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("spawn"),
        initializer=_begin,
    ) as pool:
        running: deque[Future[_Encoded]] = deque()
        try:
            for chunk in chain([first], rest):
                running.append(pool.submit(_encode_chunk, model, rows, chunk))
                if len(running) >= _AHEAD * processes:
                    yield running.popleft().result(_LONGEST_S)
            while running:
                yield running.popleft().result(_LONGEST_S)
        except BrokenProcessPool as error:
            raise SftDataError(
                f"data {path}: a process that encodes its rows died, as when memory is full"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _chunks(rows: Iterator[tuple[Path, str, Row]]) -> Iterator[_Chunk]:
    while chunk := list(islice(rows, _CHUNK_ROWS)):
        yield chunk


class _Encoder:
    """What turns rows into examples, loaded once."""

    def __init__(self, model: Path, rows: SftFormat) -> None:
        from transformers import AutoTokenizer

        # Any: a tokenizer of transformers
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._reader = PictureReader.of(model)
        self._rows = rows

    def __call__(self, chunk: _Chunk) -> _Encoded:
        """Encode rows.

        Raises:
            SftDataError: naming the row that is no example.
        """
        found = encode_rows(chunk, self._tokenizer, self._rows, self._reader)
        examples = found.examples
        return _Encoded(
            tokens=_joined([one.token_ids for one in examples], np.dtype(np.int32)),
            trainable=_joined([one.trainable for one in examples], np.dtype(np.bool_)),
            lengths=[len(one.token_ids) for one in examples],
            row_sizes=found.row_sizes,
            images={at: (one.images, one.name) for at, one in enumerate(examples) if one.images},
            num_dropped=found.num_dropped,
            num_rows=len(chunk),
        )


def _joined(arrays: list[npt.NDArray[Any]], kind: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, kind), *arrays]).astype(kind, copy=False)


@cache
def _encoder_of(model: Path, rows: SftFormat) -> _Encoder:
    return _Encoder(model, rows)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked for this ends it


def _encode_chunk(model: Path, rows: SftFormat, chunk: _Chunk) -> _Encoded:
    return _encoder_of(model, rows)(chunk)
