"""How tensors fall into rows of bytes: what can be copied without knowing shapes and dtypes."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["byte_rows", "flat_bytes", "lent_bytes", "row_bytes_of"]

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
        return lent_bytes(flat_bytes(view)).reshape(-1, 1)
    return lent_bytes(view.flatten(1).view(torch.uint8))


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor as a 1-dimensional uint8 view of the same memory.

    ``view(-1)`` would keep the stride of a tensor of one element, which may be any.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def lent_bytes(view: Tensor) -> np.ndarray:
    """The same bytes of host memory as an array.

    ``Tensor.numpy`` would leave its mark on the memory, which then can never be resized again; FSDP
    and whatever takes a model out of memory for a while do that to parameters.

    Args:
        view: Of dtype uint8; strides are free.
    """
    return np.asarray(_Lent(view)) if view.numel() else np.empty(view.shape, dtype=np.uint8)


class _Lent:
    """What NumPy asks for memory; the array keeps it, and so the tensor."""

    def __init__(self, view: Tensor) -> None:
        self._view = view
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": tuple(view.shape),
            "strides": view.stride(),
            "data": (view.data_ptr(), False),
        }
