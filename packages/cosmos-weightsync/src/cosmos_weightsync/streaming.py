"""Copying rows of bytes and hashing them in one pass.

A small C library, compiled when the package is installed, does it at more than the speed of a plain
copy: it writes past the cache and hashes out of it (`native/streaming.c`). Where it could not be
compiled, NumPy and xxhash do the same, block by block. Either way Python's lock is released.
"""

import ctypes
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import xxhash

__all__ = [
    "SHORTEST_COMPILED",
    "CompiledMoves",
    "CompiledRows",
    "Moves",
    "PlainRows",
    "RowMove",
    "RowRead",
    "StreamMoves",
    "compiled_rows",
    "row_engine",
    "usable_rows",
]

BLOCK_BYTES = 1 << 20
SHORTEST_COMPILED = 241
"""Shorter inputs have formulas of their own in XXH3, which the library does not know."""


@dataclass(frozen=True, slots=True)
class RowMove:
    """Rows to be copied, hashed or both.

    Attributes:
        rows: ``uint8[rows, row_bytes]``, each row contiguous by itself.
        into: As many rows of the same length; ``None`` if they are only to be hashed.
        is_hashed: Whether the XXH3 of the rows in order is wanted.
    """

    rows: np.ndarray
    into: np.ndarray | None
    is_hashed: bool = True


@dataclass(frozen=True, slots=True)
class RowRead:
    """Rows to be copied out of another process and hashed.

    Attributes:
        address: Of the first row there.
        step: From one row to the next.
        into: ``uint8[rows, row_bytes]``, contiguous.
    """

    address: int
    step: int
    into: np.ndarray


class Moves(Protocol):
    """Moves that were prepared once, to be made time and again, by one thread at a time."""

    def make(self) -> list[int]:
        """Make them in order.

        Returns:
            The XXH3 of each; 0 for one that is not hashed.

        Raises:
            OSError: another process's memory cannot be read; its number says why.
        """
        ...


class PlainRows:
    """What works everywhere."""

    def prepare(self, moves: Sequence[RowMove]) -> Moves:
        """Keep moves to be made."""
        return _PlainMoves(moves)


class _PlainMoves:
    def __init__(self, moves: Sequence[RowMove]) -> None:
        self._moves = moves

    def make(self) -> list[int]:
        return [_moved(move) for move in self._moves]


def _moved(move: RowMove) -> int:
    state = xxhash.xxh3_64()
    step = max(1, BLOCK_BYTES // max(1, move.rows.shape[1]))
    for first in range(0, len(move.rows), step):
        block = move.rows[first : first + step]
        if move.into is not None:
            np.copyto(move.into[first : first + step], block)
        if move.is_hashed:
            state.update(np.ascontiguousarray(block).data)
    return state.intdigest() if move.is_hashed else 0


_MOVE = np.dtype(
    [
        ("to", "u8"),
        ("to_step", "i8"),
        ("source", "u8"),
        ("source_step", "i8"),
        ("row_bytes", "u8"),
        ("num_rows", "u8"),
        ("is_hashed", "u8"),
        ("value", "u8"),
    ]
)
"""`struct move` of the library."""


class CompiledMoves:
    """Moves as the library wants them; `CompiledRows` makes them.

    Args:
        make: Of the library.
        table: Of `_MOVE`.
        memory: What the addresses in the table point into; kept alive.
        process: Out of which the rows are read; 0 for this one.
    """

    def __init__(
        self,
        make: Callable[[int, int, int], int],
        table: np.ndarray,
        memory: Sequence[RowMove],
        process: int = 0,
    ) -> None:
        sizes = table["row_bytes"] * table["num_rows"]
        self._arguments = (_address(table), len(table), process)
        self._table = table
        self._values = table["value"]
        self._make = make
        short = np.flatnonzero((sizes < SHORTEST_COMPILED) & (table["is_hashed"] == 1))
        self._shifted: np.ndarray | None = None
        self._start = 0
        self._short = {int(i): _PlainMoves([_only_hashed(memory[i])]) for i in short}
        self._memory = memory

    def in_bucket(self, end: Literal["to", "source"], start: int) -> "CompiledMoves":
        """Say that one end of all of them is in a bucket that starts at this address."""
        self._shifted, self._start = self._table[end], start
        return self

    def make_in(self, start: int) -> list[int]:
        """`make` them in a bucket that starts elsewhere."""
        assert self._shifted is not None
        self._shifted += np.array(start - self._start).astype(np.uint64)
        self._start = start
        return self.make()

    def make(self) -> list[int]:
        """See `Moves.make`."""
        _check(self._make(*self._arguments))
        values = self._values.tolist()
        for index, move in self._short.items():
            values[index] = move.make()[0]
        return values


def _only_hashed(move: RowMove) -> RowMove:
    """The hash of what has been moved."""
    return RowMove(move.rows if move.into is None else move.into, None)


class StreamMoves:
    """Rows that are sent over a stream socket one after another, or places filled from one.

    Prepared once, by `CompiledRows`, to be moved time and again by one thread at a time; a call
    of Python's for each is more than what a small one takes.

    Args:
        move: Of the library: `cosmos_send_all` or `cosmos_receive_all`.
        table: Of `_MOVE`.
        memory: What the addresses in the table point into; kept alive.
    """

    def __init__(
        self,
        move: Callable[[int, int, int, float], int],
        table: np.ndarray,
        memory: Sequence[np.ndarray],
    ) -> None:
        self._move = move
        self._place = (_address(table), len(table))
        self._values = table["value"]
        self._memory = memory

    def make(self, stream: int, until: float) -> list[int]:
        """Move them; see `CompiledRows.receive` for arguments and errors.

        Returns:
            The XXH3 of each that was received.
        """
        _check(self._move(*self._place, stream, until))
        return self._values.tolist()


class CompiledRows:
    """The same, by the compiled library.

    Args:
        path: Of the shared object.

    Raises:
        OSError: it cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        until, number = ctypes.c_double, ctypes.c_int
        self._start = _function(library.cosmos_start, None, pointer)
        self._value = _function(library.cosmos_value, ctypes.c_uint64, pointer)
        self._make = _function(library.cosmos_make, number, pointer, size, number)
        self._add = _function(library.cosmos_add, None, pointer, pointer, size)
        self._receive = _function(
            library.cosmos_receive, number, pointer, pointer, size, number, until
        )
        self._receive_all = _function(
            library.cosmos_receive_all, number, pointer, size, number, until
        )
        self._send_all = _function(library.cosmos_send_all, number, pointer, size, number, until)
        self._state_bytes = int(_function(library.cosmos_state_bytes, size)())

    def prepare(self, moves: Sequence[RowMove]) -> CompiledMoves:
        """Keep moves to be made."""
        rows = [_entry(move) for move in moves]
        return CompiledMoves(self._make, np.array(rows, dtype=_MOVE), moves)

    def prepare_reads(self, process: int, reads: Sequence[RowRead]) -> CompiledMoves:
        """Keep moves to be made out of another process, whose id this is."""
        table = np.array([_read_entry(read) for read in reads], dtype=_MOVE)
        return CompiledMoves(self._make, table, [RowMove(r.into, None) for r in reads], process)

    def receive(self, state: Any, into: np.ndarray, stream: int, until: float) -> None:
        """Fill contiguous memory from a stream socket, and carry a checksum on over it.

        Args:
            state: From `start`.
            into: Bytes.
            stream: The descriptor; it must be this socket's until this returns.
            until: The moment of the monotonic clock at which to give up; a single wait lasts as
                long as ``SO_RCVTIMEO`` says.

        Raises:
            EOFError: the stream ended.
            OSError: what the system says; `BlockingIOError` when it took too long.
        """
        _check(self._receive(state, _address(into), into.size, stream, until))

    def prepare_receive(self, places: Sequence[np.ndarray]) -> StreamMoves:
        """Keep contiguous places of `SHORTEST_COMPILED` bytes or more, to be filled in order."""
        rows = [(_address(each), 0, 0, 0, each.size, 1, 1, 0) for each in places]
        return StreamMoves(self._receive_all, np.array(rows, dtype=_MOVE), places)

    def prepare_send(self, rows: Sequence[np.ndarray]) -> StreamMoves:
        """Keep rows, as ``uint8[rows, row_bytes]``, to be sent in order from where they lie."""
        table = [_entry(RowMove(each, None, is_hashed=False)) for each in rows]
        return StreamMoves(self._send_all, np.array(table, dtype=_MOVE), rows)

    def add(self, state: Any, content: np.ndarray) -> None:
        """Carry a checksum on over contiguous bytes."""
        self._add(state, _address(content), content.size)

    def value(self, state: Any) -> int:
        """The XXH3 of all that was added, which must be `SHORTEST_COMPILED` bytes or more."""
        return int(self._value(state))

    def start(self) -> Any:
        """A checksum of nothing yet, to be carried on."""
        state = ctypes.create_string_buffer(self._state_bytes)
        self._start(state)
        return state


def _check(result: int) -> None:
    if result < 0:
        raise EOFError
    if result:
        raise OSError(result, os.strerror(result))


def _function(function: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
    function.restype, function.argtypes = result, arguments
    return function


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _entry(move: RowMove) -> tuple[int, ...]:
    """A line of `_MOVE`; without gaps on either side, rows are one."""
    rows, into = move.rows, move.into
    num_rows, row_bytes = rows.shape
    if rows.strides[0] == row_bytes and (into is None or into.strides[0] == row_bytes):
        num_rows, row_bytes = 1, rows.size
    to = (0, 0) if into is None else (_address(into), into.strides[0])
    return (*to, _address(rows), rows.strides[0], row_bytes, num_rows, int(move.is_hashed), 0)


def _read_entry(read: RowRead) -> tuple[int, ...]:
    num_rows, row_bytes = read.into.shape
    if read.step == row_bytes:
        num_rows, row_bytes = 1, read.into.size
    return (_address(read.into), 0, read.address, read.step, row_bytes, num_rows, 1, 0)


def usable_rows(path: Path) -> CompiledRows | None:
    """The library in this file; ``None``, with a warning, if it cannot be used, or is not there."""
    try:
        return CompiledRows(path) if path.exists() else None
    except (OSError, AttributeError) as error:
        warnings.warn(
            f"{path} was made on another kind of machine or by another version ({error}): weights "
            "are copied by NumPy, which is slower; install cosmos-weightsync again",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


@cache
def compiled_rows() -> CompiledRows | None:
    """The library, if it was compiled for this machine."""
    return usable_rows(Path(__file__).with_name("_streaming.so"))


@cache
def row_engine() -> PlainRows | CompiledRows:
    """The faster one that is there."""
    return compiled_rows() or PlainRows()
