"""Prompt rows that stay in their file until they are asked for."""

import copy
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from cosmos_rollout.errors import PromptDataError
from cosmos_rollout.prompts import PromptRow, json_row, prompt_row

_CHUNK = 1 << 24
_NEWLINE = 10
_SHORTEST = len('{"prompt":"a"}')


class PromptFile(Sequence[PromptRow]):
    """The rows of `read_prompts` of a ``.jsonl`` file, each read and checked when it is asked for.

    A million rows are open in a tenth of a second, for 16 bytes of memory each. The file has to
    stay as it is; that it is moved or deleted does not matter. Several threads may read.
    """

    def __init__(self, path: Path) -> None:
        """Find out where each row begins.

        Args:
            path: JSON lines; paths in rows are relative to it.

        Raises:
            PromptDataError: if there is no such file, or it has no rows.
        """
        if not path.is_file():
            raise PromptDataError(f"there is no prompt file {path}")
        self._path = path
        if not path.stat().st_size:
            raise PromptDataError(f"{path}: the file has no rows")
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bounds = _line_bounds(self._bytes)
        lengths = np.diff(self._bounds)
        # lines that are empty count where people count lines
        empty = [int(n) for n in np.flatnonzero(lengths < _SHORTEST) if not self._line(n).strip()]
        self._numbers = np.delete(np.arange(len(lengths)), empty)
        if not len(self):
            raise PromptDataError(f"{path}: the file has no rows")

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[PromptRow]: ...

    def __getitem__(self, index: int | slice) -> PromptRow | Sequence[PromptRow]:
        """Return a row, or rows that stay in the file as well.

        Raises:
            IndexError: if there are fewer.
            PromptDataError: naming file, line and field.
        """
        if isinstance(index, slice):
            return self.only(range(len(self))[index])
        number = int(self._numbers[index])
        where = f"{self._path}:{number + 1}"
        raw = json_row(self._line(number), where)
        return prompt_row(raw, where, default_id=str(number + 1), folder=self._path.parent)

    def only(self, indices: Iterable[int]) -> "PromptFile":
        """Return some of the rows, of the same file, in the order of ``indices``."""
        some = copy.copy(self)
        some._numbers = self._numbers[np.fromiter(indices, np.int64)]
        return some

    def _line(self, number: int) -> bytes:
        return self._bytes[self._bounds[number] : self._bounds[number + 1]]


def _line_bounds(text: mmap.mmap) -> npt.NDArray[np.int64]:
    """Return where lines begin, and where the last one ends."""
    found = [np.zeros(1, np.int64)]
    for at in range(0, len(text), _CHUNK):
        chunk = np.frombuffer(text[at : at + _CHUNK], np.uint8)
        found.append(at + 1 + np.flatnonzero(chunk == _NEWLINE))
    bounds = np.concatenate(found)
    return bounds if bounds[-1] == len(text) else np.append(bounds, len(text))
