"""The pieces of a transfer: one by one, and as classes of tensors that are cut alike."""

from dataclasses import dataclass

import numpy as np

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.layout import IntArray

__all__ = ["Piece", "PieceClass"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of one tensor, moved once from holder ``source`` to rank ``receiver``.

    Holders are numbered: sender ranks first, then receiver ranks, which pass on what they have.
    """

    name: str
    box: Box
    source: int
    receiver: int
    num_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class PieceClass:
    """The pieces of all tensors that are cut alike on both sides.

    Tensor t's piece p is ``starts[p]:stops[p]``. ``holders[p]`` and ``fanouts[p]`` are positions in
    the plan's lists; ``firsts[t, p]`` is the holder of that set at which the piece begins and
    ``slots[t, p]`` the route. A single row holds for every tensor.
    """

    names: tuple[str, ...]
    item_bytes: int
    starts: IntArray
    stops: IntArray
    holders: IntArray
    fanouts: IntArray
    firsts: IntArray
    slots: IntArray

    def piece_bytes(self) -> IntArray:
        """Bytes of each piece, the same for every tensor of the class."""
        return np.prod(self.stops - self.starts, axis=1, dtype=np.int64) * self.item_bytes
