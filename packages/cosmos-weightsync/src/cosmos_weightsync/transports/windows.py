"""The simplest window: memory of the sender that this process can read like its own."""

from torch import Tensor

__all__ = ["MappedWindow"]


class MappedWindow:
    """A view of memory that this process can read like its own."""

    def __init__(self, view: Tensor) -> None:
        self._view = view

    def read(self, part: tuple[slice, ...], into: Tensor) -> None:
        """Copy a part of the view."""
        into.copy_(self._view[part])
