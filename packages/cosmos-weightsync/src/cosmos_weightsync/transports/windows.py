"""The simplest window: memory of the sender that this process can read like its own."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cosmos_weightsync.streaming import row_engine

__all__ = ["MappedWindow", "row_bytes_of", "strided_view"]

_SHORTEST_ROW = 64


def row_bytes_of(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> int | None:
    """How a view falls into rows; see `cosmos_weightsync.transports.Window.row_bytes`.

    Args:
        shape: Of the view.
        strides: In elements.
        item_bytes: Of an element.
    """
    run = 1
    for size, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if size != 1 and stride != run:
            return None
        run *= size
    if not shape or shape[0] == 1 or strides[0] == run:
        return 1
    return run * item_bytes if run * item_bytes >= _SHORTEST_ROW else None


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
        self._rows: np.ndarray | None = None
        self._row_bytes = None
        if view.device.type == "cpu":
            self._row_bytes = row_bytes_of(view.shape, view.stride(), view.element_size())
        if self._row_bytes == 1:
            self._rows = view.reshape(-1, 1).view(torch.uint8).numpy().reshape(-1, 1)
        elif self._row_bytes is not None:
            self._rows = view.flatten(1).view(torch.uint8).numpy()

    @property
    def row_bytes(self) -> int | None:
        """See `cosmos_weightsync.transports.Window.row_bytes`."""
        return self._row_bytes

    def take(self, into: np.ndarray) -> int:
        """Copy all rows, and hash them."""
        assert self._rows is not None
        return row_engine().copy_and_hash(self._rows, into)

    def read(self, part: tuple[slice, ...], into: Tensor) -> None:
        """Copy a part of the view."""
        into.copy_(self._view[part])
