"""Which boxes of one cut of a tensor cover which boxes of another: the geometric half of planning.

Works on one pair of geometries at a time. Equal boxes on several ranks are looked at once, so the
work depends on the number of distinct boxes and not on the number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cosmos_weightsync.boxes import Box, subtract_all
from cosmos_weightsync.layout import Geometry, IntArray
from cosmos_weightsync.watching import Watch, unwatched, watched

__all__ = ["Match", "RankSets", "Uncovered", "match_geometries"]

MAX_CELLS_PER_BOX = 16
"""Overlapping boxes are cut where they overlap unless that makes more parts than this for each."""

RankSets = tuple[IntArray, ...]
_Cover = tuple[IntArray, IntArray, IntArray]


@dataclass(frozen=True, eq=False, slots=True)
class Match:
    """Disjoint pieces that together are everything the receivers hold.

    Piece i is ``starts[i]:stops[i]``, goes to all ranks of ``consumers[consumer[i]]``, and any rank
    of ``holders[holder[i]]`` can send it.
    """

    starts: IntArray
    stops: IntArray
    consumer: IntArray
    holder: IntArray
    consumers: RankSets
    holders: RankSets

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
    """Distinct boxes, and who holds each."""

    starts: IntArray
    stops: IntArray
    ranks: RankSets

    def box(self, index: int) -> Box:
        return Box(tuple(self.starts[index].tolist()), tuple(self.stops[index].tolist()))


def _distinct(geometry: Geometry) -> _Distinct:
    ndim = len(geometry.shape)
    corners = np.concatenate([geometry.starts, geometry.stops], axis=1)
    if ndim == 0 or not len(corners):
        ranks = (np.unique(geometry.ranks),) if len(corners) else ()
        return _Distinct(corners[:1, :ndim], corners[:1, ndim:], ranks)
    unique, inverse = np.unique(corners, axis=0, return_inverse=True)
    order = np.argsort(inverse.ravel(), kind="stable")
    cuts = np.searchsorted(inverse.ravel()[order], np.arange(1, len(unique)))
    parts = np.split(geometry.ranks[order], cuts)
    ranks = tuple(part if len(part) == 1 else np.unique(part) for part in parts)
    return _Distinct(unique[:, :ndim], unique[:, ndim:], ranks)


class _Sweep:
    """Boxes sorted along the dim that tells them apart best.

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

    def overlapping(self, start: IntArray, stop: IntArray) -> _Cover:
        """Indices of the boxes that share something with this one, and what they share."""
        if len(start) == 0:
            corners = np.zeros((len(self.order), 0), dtype=np.int64)
            return self.order, corners, corners
        last = np.searchsorted(self.starts, stop[self.dim], side="left")
        first = np.searchsorted(self.max_stops, start[self.dim], side="right")
        candidates = self.order[first:last]
        low = np.maximum(self.boxes.starts[candidates], start)
        high = np.minimum(self.boxes.stops[candidates], stop)
        hit = np.all(low < high, axis=1)
        return candidates[hit], low[hit], high[hit]


def match_geometries(
    senders: Geometry, receivers: Geometry, watch: Watch = unwatched
) -> Match | Uncovered:
    """Cover every receiver box with pieces of sender boxes, every element exactly once.

    Boxes that overlap are cut first, so that what several ranks hold or want in common is one piece
    for all of them.
    """
    offered, wanted = (_without_overlaps(_distinct(side)) for side in (senders, receivers))
    sweep = _Sweep(offered)
    covers: list[_Cover] = []
    numels = np.prod(wanted.stops - wanted.starts, axis=1).tolist()
    for index, numel in enumerate(watched(numels, "matching", watch)):
        found, low, high = sweep.overlapping(wanted.starts[index], wanted.stops[index])
        if int(np.prod(high - low, axis=1).sum()) != numel:
            box = wanted.box(index)
            found, low, high = _disjoint(box, offered, found.tolist())
            if int(np.prod(high - low, axis=1).sum()) != box.numel:
                missing = subtract_all(box, (offered.box(i) for i in found.tolist()))[0]
                offers = tuple(offered.box(i) for i in range(len(offered.starts)))
                return Uncovered(int(wanted.ranks[index][0]), box, missing, offers)
        covers.append((found, low, high))
    size = (0, len(receivers.shape))
    none = np.zeros(0, dtype=np.int64)
    return Match(
        starts=np.concatenate([np.zeros(size, dtype=np.int64), *(low for _, low, _ in covers)]),
        stops=np.concatenate([np.zeros(size, dtype=np.int64), *(high for _, _, high in covers)]),
        consumer=np.repeat(
            np.arange(len(covers), dtype=np.int64),
            np.array([len(found) for found, _, _ in covers], dtype=np.int64),
        ),
        holder=np.concatenate([none, *(found for found, _, _ in covers)]),
        consumers=wanted.ranks,
        holders=offered.ranks,
    )


def _without_overlaps(boxes: _Distinct) -> _Distinct:
    """Cut boxes that overlap along one another's sides; the parts have the holders of both.

    Nothing changes where nothing overlaps, or where the cuts would be too many.
    """
    if not _overlap(boxes):
        return boxes
    ndim = boxes.starts.shape[1]
    edges = [np.unique([boxes.starts[:, d], boxes.stops[:, d]]) for d in range(ndim)]
    counts = [len(edge) - 1 for edge in edges]
    owners: dict[tuple[int, ...], list[int]] = {}
    for index in range(len(boxes.starts)):
        spans = [
            np.arange(*np.searchsorted(edges[d], [boxes.starts[index, d], boxes.stops[index, d]]))
            for d in range(ndim)
        ]
        if np.prod([len(span) for span in spans]) > MAX_CELLS_PER_BOX * len(boxes.starts):
            return boxes
        for cell in np.stack(np.meshgrid(*spans, indexing="ij"), axis=-1).reshape(-1, ndim):
            owners.setdefault(tuple(cell.tolist()), []).append(index)
    if len(owners) > MAX_CELLS_PER_BOX * len(boxes.starts) or not all(counts):
        return boxes
    cells = sorted(owners)
    corners = [np.array([cell[d] for cell in cells], dtype=np.int64) for d in range(ndim)]
    return _Distinct(
        np.stack([edges[d][corners[d]] for d in range(ndim)], axis=1),
        np.stack([edges[d][corners[d] + 1] for d in range(ndim)], axis=1),
        tuple(np.unique(np.concatenate([boxes.ranks[i] for i in owners[cell]])) for cell in cells),
    )


def _overlap(boxes: _Distinct) -> bool:
    """Whether any two of these boxes share an element."""
    if len(boxes.starts) < 2 or boxes.starts.shape[1] == 0:
        return False
    sweep = _Sweep(boxes)
    if np.all(sweep.starts[1:] >= sweep.max_stops[:-1]):
        return False
    return any(
        len(sweep.overlapping(boxes.starts[index], boxes.stops[index])[0]) > 1
        for index in range(len(boxes.starts))
    )


def _disjoint(wanted: Box, offered: _Distinct, candidates: Sequence[int]) -> _Cover:
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
