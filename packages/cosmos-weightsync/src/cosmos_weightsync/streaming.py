"""Copying rows of bytes and hashing them in one pass.

A small C library, compiled when the package is installed, does it at more than the speed of a plain
copy: it writes past the cache and hashes out of it (`native/streaming.c`). Where it could not be
compiled, NumPy and xxhash do the same, block by block. Either way Python's lock is released.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

__all__ = ["SHORTEST_COMPILED", "CompiledRows", "PlainRows", "compiled_rows", "row_engine"]

BLOCK_BYTES = 1 << 20
SHORTEST_COMPILED = 241
"""Shorter inputs have formulas of their own in XXH3, which the library does not know."""


class PlainRows:
    """What works everywhere. Rows are ``uint8[rows, row_bytes]``, each contiguous by itself."""

    def copy(self, rows: np.ndarray, into: np.ndarray) -> None:
        """Copy rows into as many rows of the same length."""
        np.copyto(into, rows)

    def copy_and_hash(self, rows: np.ndarray, into: np.ndarray) -> int:
        """Copy rows, and return the XXH3 of them in order."""
        state = xxhash.xxh3_64()
        for block in _blocks(rows):
            np.copyto(into[block], rows[block])
            state.update(np.ascontiguousarray(into[block]).data)
        return state.intdigest()

    def hash(self, rows: np.ndarray) -> int:
        """The XXH3 of the rows in order."""
        state = xxhash.xxh3_64()
        for block in _blocks(rows):
            state.update(np.ascontiguousarray(rows[block]).data)
        return state.intdigest()


def _blocks(rows: np.ndarray) -> Iterator[slice]:
    step = max(1, BLOCK_BYTES // max(1, rows.shape[1]))
    for first in range(0, len(rows), step):
        yield slice(first, first + step)


class CompiledRows:
    """The same, by the compiled library.

    Args:
        path: Of the shared object.

    Raises:
        OSError: it cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, size, step = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ssize_t
        self._start = _function(library.cosmos_start, None, pointer)
        self._value = _function(library.cosmos_value, ctypes.c_uint64, pointer)
        self._move = _function(
            library.cosmos_move, None, pointer, pointer, step, pointer, step, size, size
        )
        self._read = _function(
            library.cosmos_read,
            ctypes.c_int,
            *(pointer, pointer, ctypes.c_int, ctypes.c_uint64, step, size, size),
        )
        until, number = ctypes.c_double, ctypes.c_int
        self._add = _function(library.cosmos_add, None, pointer, pointer, size)
        self._receive = _function(
            library.cosmos_receive, number, pointer, pointer, size, number, until
        )
        self._send = _function(
            library.cosmos_send, number, pointer, step, size, size, number, until
        )
        self._state_bytes = int(_function(library.cosmos_state_bytes, size)())

    def copy(self, rows: np.ndarray, into: np.ndarray) -> None:
        """See `PlainRows.copy`."""
        self._move(None, _address(into), into.strides[0], *_source(rows, into))

    def copy_and_hash(self, rows: np.ndarray, into: np.ndarray) -> int:
        """See `PlainRows.copy_and_hash`."""
        if rows.size < SHORTEST_COMPILED:
            return PlainRows().copy_and_hash(rows, into)
        state = self.start()
        self._move(state, _address(into), into.strides[0], *_source(rows, into))
        return int(self._value(state))

    def hash(self, rows: np.ndarray) -> int:
        """See `PlainRows.hash`."""
        if rows.size < SHORTEST_COMPILED:
            return PlainRows().hash(rows)
        state = self.start()
        self._move(state, None, 0, *_source(rows, rows))
        return int(self._value(state))

    def read_and_hash(self, process: int, address: int, step: int, into: np.ndarray) -> int:
        """Copy rows out of another process, and return the XXH3 of them in order.

        Args:
            process: Its id.
            address: Of the first row there.
            step: From one row to the next.
            into: ``uint8[rows, row_bytes]``, contiguous.

        Raises:
            OSError: the system refused; its number says why.
        """
        state = self.start()
        num_rows, row_bytes = into.shape
        if step == row_bytes:
            num_rows, row_bytes = 1, into.size
        failure = self._read(state, _address(into), process, address, step, row_bytes, num_rows)
        if failure:
            raise OSError(failure, os.strerror(failure))
        is_short = into.size < SHORTEST_COMPILED
        return PlainRows().hash(into) if is_short else int(self._value(state))

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

    def send(self, rows: np.ndarray, stream: int, until: float) -> None:
        """Send rows over a stream socket from where they lie; see `receive`."""
        num_rows, row_bytes = rows.shape
        if rows.strides[0] == row_bytes:
            num_rows, row_bytes = 1, rows.size
        _check(self._send(_address(rows), rows.strides[0], row_bytes, num_rows, stream, until))

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


def _source(rows: np.ndarray, into: np.ndarray) -> tuple[int, int, int, int]:
    """Address, step, length and number of the rows; without gaps on either side they are one."""
    num_rows, row_bytes = rows.shape
    if into.strides[0] == rows.strides[0] == row_bytes:
        num_rows, row_bytes = 1, rows.size
    return _address(rows), rows.strides[0], row_bytes, num_rows


@cache
def compiled_rows() -> CompiledRows | None:
    """The library, if it was compiled for this machine."""
    path = Path(__file__).with_name("_streaming.so")
    try:
        return CompiledRows(path) if path.exists() else None
    except (OSError, AttributeError):  # Made on another kind of machine, or from other source.
        return None


@cache
def row_engine() -> PlainRows | CompiledRows:
    """The faster one that is there."""
    return compiled_rows() or PlainRows()
