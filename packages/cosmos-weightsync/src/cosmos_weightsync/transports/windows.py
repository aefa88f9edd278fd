"""The simplest window: memory of the sender that this process can read like its own."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from cosmos_weightsync.byte_rows import byte_rows
from cosmos_weightsync.streaming import RowMove, row_engine

__all__ = ["MappedWindow", "MappedWindows", "strided_view"]


def strided_view(
    memory: Tensor, dtype: torch.dtype, shape: tuple[int, ...], offset: int, strides: Sequence[int]
) -> Tensor:
    """A view at a byte offset of memory given as bytes; strides count elements."""
    usable = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return usable.as_strided(shape, tuple(strides), offset // dtype.itemsize)


class MappedWindow:
    """A view of memory that this process can read like its own.

    Attributes:
        rows: The same as rows of bytes, if it falls into any.
    """

    def __init__(self, view: Tensor) -> None:
        self._view = view
        self.rows = byte_rows(view)

    @property
    def row_bytes(self) -> int | None:
        """See `cosmos_weightsync.transports.Window.row_bytes`."""
        return None if self.rows is None else self.rows.shape[1]

    def read(self, part: tuple[slice, ...], into: Tensor) -> None:
        """Copy a part of the view."""
        into.copy_(self._view[part])


class MappedWindows:
    """Views of memory that this process can read like its own."""

    def __init__(self, views: Iterable[Tensor]) -> None:
        self._windows = [MappedWindow(view) for view in views]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, number: int) -> MappedWindow:
        return self._windows[number]

    def prepare(self, first: int, into: Sequence[np.ndarray]) -> Callable[[], list[int]]:
        """See `cosmos_weightsync.transports.Windows.prepare`."""
        moves: list[RowMove] = []
        for window, place in zip(self._windows[first : first + len(into)], into, strict=True):
            assert window.rows is not None
            moves.append(RowMove(window.rows, place.reshape(window.rows.shape)))
        return row_engine().prepare(moves).make
