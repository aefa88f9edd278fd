"""Which boxes of one cut of a tensor cover which boxes of another: the geometric half of planning.

Works on one pair of geometries at a time. Equal boxes on several ranks are looked at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cosmos_weightsync.boxes import Box, subtract_all
from cosmos_weightsync.layout import Geometry, IntArray

__all__ = ["Match", "Uncovered", "match_geometries"]


@dataclass(frozen=True, eq=False, slots=True)
class Match:
    """Disjoint pieces that together are everything the receivers hold.

    Piece i is ``starts[i]:stops[i]``, goes to rank ``receivers[i]``, and any of the ranks
    ``holders[i]`` can send it.
    """

    starts: IntArray
    stops: IntArray
    receivers: IntArray
    holders: tuple[IntArray, ...]

    def numel(self) -> IntArray:
        """Elements of each piece."""
        return np.prod(self.stops - self.starts, axis=1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Uncovered:
    """Why no match exists: this region of this receiver is offered by no one."""

    receiver: int
    wanted: Box
    missing: Box
    offered: tuple[Box, ...]


@dataclass(frozen=True, eq=False, slots=True)
class _Distinct:
    """The distinct boxes of a geometry, and who holds each."""

    starts: IntArray
    stops: IntArray
    ranks: tuple[IntArray, ...]

    def box(self, index: int) -> Box:
        return Box(tuple(self.starts[index].tolist()), tuple(self.stops[index].tolist()))


def _distinct(geometry: Geometry) -> _Distinct:
    ndim = len(geometry.shape)
    corners = np.concatenate([geometry.starts, geometry.stops], axis=1)
    if ndim == 0:
        return _Distinct(corners[:1], corners[:1], (np.unique(geometry.ranks),))
    unique, inverse = np.unique(corners, axis=0, return_inverse=True)
    order = np.argsort(inverse.ravel(), kind="stable")
    cuts = np.searchsorted(inverse.ravel()[order], np.arange(1, len(unique)))
    ranks = tuple(np.unique(part) for part in np.split(geometry.ranks[order], cuts))
    return _Distinct(unique[:, :ndim], unique[:, ndim:], ranks)


class _Sweep:
    """Sender boxes sorted along the dim that tells them apart best.

    For a wanted interval the candidates are one contiguous range: they start before it ends, and
    (by a running maximum of stops) may end after it starts.
    """

    def __init__(self, boxes: _Distinct) -> None:
        self.boxes = boxes
        ndim = boxes.starts.shape[1]
        self.dim = max(range(ndim), key=lambda d: len(np.unique(boxes.starts[:, d])), default=0)
        if ndim == 0:
            self.order = np.arange(len(boxes.starts))
            return
        self.order = np.argsort(boxes.starts[:, self.dim], kind="stable")
        self.starts = boxes.starts[self.order, self.dim]
        self.max_stops = np.maximum.accumulate(boxes.stops[self.order, self.dim])

    def overlapping(self, start: IntArray, stop: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Indices of the sender boxes that share elements with a box, and the shared corners."""
        if len(start) == 0:
            return self.order, self.boxes.starts, self.boxes.stops
        last = np.searchsorted(self.starts, stop[self.dim], side="left")
        first = np.searchsorted(self.max_stops, start[self.dim], side="right")
        candidates = self.order[first:last]
        low = np.maximum(self.boxes.starts[candidates], start)
        high = np.minimum(self.boxes.stops[candidates], stop)
        hit = np.all(low < high, axis=1)
        return candidates[hit], low[hit], high[hit]


def match_geometries(senders: Geometry, receivers: Geometry) -> Match | Uncovered:
    """Cover every receiver box with pieces of sender boxes, every element exactly once."""
    offered, wanted = _distinct(senders), _distinct(receivers)
    sweep = _Sweep(offered)
    starts: list[IntArray] = []
    stops: list[IntArray] = []
    ranks: list[IntArray] = []
    holders: list[IntArray] = []
    for index in range(len(wanted.ranks) if len(receivers.ranks) else 0):
        found, low, high = sweep.overlapping(wanted.starts[index], wanted.stops[index])
        volume = int(np.prod(high - low, axis=1).sum())
        box = wanted.box(index)
        if volume != box.numel:
            found, low, high = _disjoint(box, offered, found.tolist())
            if int(np.prod(high - low, axis=1).sum()) != box.numel:
                missing = subtract_all(box, (offered.box(i) for i in found.tolist()))[0]
                offers = tuple(offered.box(i) for i in range(len(offered.starts)))
                return Uncovered(int(wanted.ranks[index][0]), box, missing, offers)
        for rank in wanted.ranks[index]:
            starts.append(low)
            stops.append(high)
            ranks.append(np.full(len(found), rank, dtype=np.int64))
            holders.extend(offered.ranks[i] for i in found)
    size = (0, len(receivers.shape))
    return Match(
        np.concatenate([np.zeros(size, dtype=np.int64), *starts]),
        np.concatenate([np.zeros(size, dtype=np.int64), *stops]),
        np.concatenate([np.zeros(0, dtype=np.int64), *ranks]),
        tuple(holders),
    )


def _disjoint(
    wanted: Box, offered: _Distinct, candidates: Sequence[int]
) -> tuple[IntArray, IntArray, IntArray]:
    """Cover by boxes that partly overlap one another: each takes what those before it left."""
    rest: tuple[Box, ...] = (wanted,)
    found: list[int] = []
    pieces: list[Box] = []
    for index in candidates:
        box = offered.box(index)
        shared = [part for part in (left.intersect(box) for left in rest) if part is not None]
        pieces.extend(shared)
        found.extend([index] * len(shared))
        rest = tuple(part for left in rest for part in left.subtract(box))
    size = (len(pieces), len(wanted.start))
    return (
        np.array(found, dtype=np.int64),
        np.array([piece.start for piece in pieces], dtype=np.int64).reshape(size),
        np.array([piece.stop for piece in pieces], dtype=np.int64).reshape(size),
    )
