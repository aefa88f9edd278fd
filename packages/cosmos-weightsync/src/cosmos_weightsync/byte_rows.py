"""How tensors fall into rows of bytes: what can be copied without knowing shapes and dtypes."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["byte_rows", "row_bytes_of"]

_SHORTEST_ROW = 64


def row_bytes_of(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> int | None:
    """The length of a view's rows: 1 if it is contiguous, so that it can be cut anywhere.

    Args:
        shape: Of the view.
        strides: In elements.
        item_bytes: Of an element.

    Returns:
        ``None`` if the rows of the first dim are no stretches of bytes, or hardly longer than
        what it takes to say where they are.
    """
    run = 1
    for size, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if size != 1 and stride != run:
            return None
        run *= size
    if not shape or shape[0] == 1 or strides[0] == run:
        return 1
    return run * item_bytes if run * item_bytes >= _SHORTEST_ROW else None


def byte_rows(view: Tensor) -> np.ndarray | None:
    """A view of host memory as ``uint8[rows, row_bytes]``, or ``None``; see `row_bytes_of`."""
    if view.device.type != "cpu":
        return None
    row_bytes = row_bytes_of(view.shape, view.stride(), view.element_size())
    if row_bytes is None:
        return None
    if row_bytes == 1:
        return view.reshape(-1, 1).view(torch.uint8).numpy().reshape(-1, 1)
    return view.flatten(1).view(torch.uint8).numpy()
