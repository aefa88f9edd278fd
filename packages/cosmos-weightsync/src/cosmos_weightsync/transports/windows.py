"""The simplest window: memory of the sender that this process can read like its own."""

import numpy as np
import torch
from torch import Tensor

__all__ = ["MappedWindow"]


class MappedWindow:
    """A view of memory that this process can read like its own."""

    def __init__(self, view: Tensor) -> None:
        self._view = view
        self._raw: np.ndarray | None = None
        if view.is_contiguous() and view.device.type == "cpu":
            self._raw = view.view(-1).view(torch.uint8).numpy()

    @property
    def is_contiguous(self) -> bool:
        """Whether its bytes follow one another in host memory."""
        return self._raw is not None

    def read_bytes(self, start: int, into: np.ndarray) -> None:
        """Copy bytes of a contiguous view."""
        assert self._raw is not None
        np.copyto(into, self._raw[start : start + len(into)])

    def read(self, part: tuple[slice, ...], into: Tensor) -> None:
        """Copy a part of the view."""
        into.copy_(self._view[part])
