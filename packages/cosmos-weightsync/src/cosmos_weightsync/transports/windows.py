"""The simplest window: memory of the sender that this process can read like its own."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cosmos_weightsync.byte_rows import byte_rows
from cosmos_weightsync.streaming import Moves, RowMove, row_engine

__all__ = ["MappedWindow", "strided_view"]


def strided_view(
    memory: Tensor, dtype: torch.dtype, shape: tuple[int, ...], offset: int, strides: Sequence[int]
) -> Tensor:
    """A view at a byte offset of memory given as bytes; strides count elements."""
    usable = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return usable.as_strided(shape, tuple(strides), offset // dtype.itemsize)


class MappedWindow:
    """A view of memory that this process can read like its own."""

    def __init__(self, view: Tensor) -> None:
        self._view = view
        self._rows = byte_rows(view)
        self._into: np.ndarray | None = None
        self._moves: Moves | None = None

    @property
    def row_bytes(self) -> int | None:
        """See `cosmos_weightsync.transports.Window.row_bytes`."""
        return None if self._rows is None else self._rows.shape[1]

    def take(self, into: np.ndarray) -> int:
        """Copy all rows, and hash them; prepared anew only for another place."""
        assert self._rows is not None
        if self._moves is None or into is not self._into:
            self._into = into
            move = RowMove(self._rows, into.reshape(self._rows.shape))
            self._moves = row_engine().prepare([move])
        return self._moves.make()[0]

    def read(self, part: tuple[slice, ...], into: Tensor) -> None:
        """Copy a part of the view."""
        into.copy_(self._view[part])
