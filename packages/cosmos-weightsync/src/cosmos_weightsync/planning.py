"""Which rank sends which box of which tensor to whom: a pure function of two layouts.

```
layouts ─► pairs of distinct cuts ─► pieces (matching) ─► holder of each piece (balance) ─► plan
```
Every rank of both sides computes the plan for itself and gets the same one, so no piece carries a
header on the wire; equal digests prove it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.errors import UncoveredRegionError, UnknownTensorError
from cosmos_weightsync.layout import ITEM_BYTES, Geometry, IntArray, Layout
from cosmos_weightsync.matching import Match, Uncovered, match_geometries

__all__ = ["Piece", "PieceClass", "PlanStats", "TransferPlan", "plan_transfer"]

SPLIT_BYTES = 1 << 20
"""A piece that several ranks hold is shared out between them in parts not smaller than this."""


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

    Tensor t's piece p is ``starts[p]:stops[p]``, from ``sources[t, p]`` to ``receivers[p]``. Where
    no piece has a choice of sources, ``sources`` has a single row, which holds for every tensor.
    """

    names: tuple[str, ...]
    item_bytes: int
    starts: IntArray
    stops: IntArray
    receivers: IntArray
    sources: IntArray

    def piece_bytes(self) -> IntArray:
        """Bytes of each piece, the same for every tensor of the class."""
        return np.prod(self.stops - self.starts, axis=1, dtype=np.int64) * self.item_bytes


@dataclass(frozen=True, slots=True)
class PlanStats:
    """How a plan loads the two sides.

    ``imbalance`` is the busiest sender's bytes over the mean of all senders: 1 is perfect.
    """

    num_tensors: int
    num_pieces: int
    num_edges: int
    total_bytes: int
    max_sender_bytes: int
    max_receiver_bytes: int
    imbalance: float


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """Every receiver element exactly once, in an order that both sides know.

    Attributes:
        num_senders: Ranks on the sending side.
        num_receivers: Ranks on the receiving side.
        classes: The pieces, by class of tensors.
        order: The receivers' tensor names in the order in which they travel.
    """

    num_senders: int
    num_receivers: int
    classes: tuple[PieceClass, ...]
    order: tuple[str, ...]

    def pieces(self, *, source: int | None = None, receiver: int | None = None) -> list[Piece]:
        """All pieces, or those of one source, of one receiver, or of one edge; in travel order."""
        position = {name: index for index, name in enumerate(self.order)}
        found = [
            (position[piece.name], index, piece)
            for index, piece in enumerate(self._pieces(source, receiver))
        ]
        return [piece for _, _, piece in sorted(found, key=lambda item: item[:2])]

    def _pieces(self, source: int | None, receiver: int | None) -> Iterator[Piece]:
        for group in self.classes:
            num_bytes = group.piece_bytes()
            chosen = np.ones(group.sources.shape, dtype=bool)
            if source is not None:
                chosen &= group.sources == source
            if receiver is not None:
                chosen &= group.receivers == receiver
            sources = np.broadcast_to(group.sources, (len(group.names), group.sources.shape[1]))
            for tensor, piece in np.argwhere(np.broadcast_to(chosen, sources.shape)):
                box = Box(tuple(group.starts[piece].tolist()), tuple(group.stops[piece].tolist()))
                yield Piece(
                    group.names[tensor],
                    box,
                    int(sources[tensor, piece]),
                    int(group.receivers[piece]),
                    int(num_bytes[piece]),
                )

    def edge_bytes(self) -> IntArray:
        """Bytes from each sender (row) to each receiver (column)."""
        total = np.zeros((self.num_senders, self.num_receivers), dtype=np.int64)
        for group in self.classes:
            receivers = np.broadcast_to(group.receivers, group.sources.shape)
            repeats = len(group.names) // len(group.sources) if group.sources.size else 0
            weights = np.broadcast_to(group.piece_bytes() * repeats, group.sources.shape)
            np.add.at(total, (group.sources.ravel(), receivers.ravel()), weights.ravel())
        return total

    def stats(self) -> PlanStats:
        """Counts and loads."""
        edges = self.edge_bytes()
        by_sender, by_receiver = edges.sum(axis=1), edges.sum(axis=0)
        total = int(edges.sum())
        mean = total / self.num_senders if self.num_senders else 0.0
        return PlanStats(
            num_tensors=len(self.order),
            num_pieces=sum(len(group.names) * len(group.receivers) for group in self.classes),
            num_edges=int(np.count_nonzero(edges)),
            total_bytes=total,
            max_sender_bytes=int(by_sender.max(initial=0)),
            max_receiver_bytes=int(by_receiver.max(initial=0)),
            imbalance=float(by_sender.max(initial=0)) / mean if mean else 1.0,
        )

    def digest(self) -> str:
        """16 bytes in hex: two ranks with equal digests move the same bytes in the same order."""
        state = hashlib.blake2b(digest_size=16)
        state.update(json.dumps([self.num_senders, self.num_receivers, self.order]).encode())
        for group in self.classes:
            state.update(json.dumps([group.names, group.item_bytes]).encode())
            for array in (group.starts, group.stops, group.receivers, group.sources):
                state.update(np.ascontiguousarray(array).tobytes())
        return state.hexdigest()


def plan_transfer(senders: Layout, receivers: Layout) -> TransferPlan:
    """Decide who sends what.

    The same two layouts give the same plan on every machine. Bytes travel in the senders' dtype;
    the receivers' dtypes do not matter here.

    Args:
        senders: What the sending ranks hold, in the dtype that goes over the wire.
        receivers: What the receiving ranks want; it may be a part of the senders' tensors.

    Raises:
        UnknownTensorError: a wanted tensor is not offered, or with another global shape.
        UncoveredRegionError: a wanted region is not offered.
    """
    groups: dict[tuple[int, int, int], list[str]] = {}
    for name, entry in receivers.tensors.items():
        _check_offered(name, senders, receivers)
        offer = senders.tensors[name]
        key = (offer.geometry, entry.geometry, ITEM_BYTES[offer.dtype])
        groups.setdefault(key, []).append(name)
    matched: list[tuple[Match, int, list[str]]] = []
    for (offered, wanted, item_bytes), names in groups.items():
        match = match_geometries(senders.geometries[offered], receivers.geometries[wanted])
        if isinstance(match, Uncovered):
            raise _uncovered(names[0], match, senders.geometries[offered])
        matched.append((_split_shared(match, item_bytes), item_bytes, names))
    # What has one holder only is settled first: the rest then evens out the load it leaves.
    matched.sort(key=lambda item: any(len(held) > 1 for held in item[0].holders))
    load = np.zeros(senders.num_ranks, dtype=np.int64)
    classes: list[PieceClass] = []
    for match, item_bytes, names in matched:
        chosen = _choose_holders(match, item_bytes, len(names), load)
        classes.append(
            PieceClass(tuple(names), item_bytes, match.starts, match.stops, match.receivers, chosen)
        )
    return TransferPlan(
        senders.num_ranks, receivers.num_ranks, tuple(classes), tuple(receivers.tensors)
    )


def _check_offered(name: str, senders: Layout, receivers: Layout) -> None:
    if name not in senders.tensors:
        raise UnknownTensorError(
            f"{name}: no sender has it; they have {len(senders.tensors)} tensors"
            f"{_nearest(name, senders.tensors)}"
        )
    have, want = senders.shape_of(name), receivers.shape_of(name)
    if have != want:
        raise UnknownTensorError(f"{name}: receivers want shape {want}, senders have {have}")


def _nearest(name: str, names: Mapping[str, object]) -> str:
    tail = name.rsplit(".", 1)[-1]
    alike = [other for other in names if other.endswith(name) or name.endswith(other)]
    alike += [other for other in names if other.endswith(tail)]
    return f", such as {alike[0]}" if alike else ""


def _uncovered(name: str, match: Uncovered, senders: Geometry) -> UncoveredRegionError:
    offers = ", ".join(str(box) for box in match.offered[:4])
    more = f" and {len(match.offered) - 4} more" if len(match.offered) > 4 else ""
    return UncoveredRegionError(
        f"{name} {senders.shape}: receiver {match.receiver} needs {match.wanted}, of which "
        f"{match.missing} is not offered; senders offer {offers or 'nothing'}{more}"
    )


def _split_shared(match: Match, item_bytes: int) -> Match:
    """Cut large pieces with several holders, so that the holders can share the work."""
    sizes = match.numel() * item_bytes
    parts = [
        max(1, min(len(held), int(size) // SPLIT_BYTES))
        for held, size in zip(match.holders, sizes, strict=True)
    ]
    if all(count == 1 for count in parts):
        return match
    starts: list[IntArray] = []
    stops: list[IntArray] = []
    repeats: list[int] = []
    for row, count in enumerate(parts):
        low, high = _cut(match.starts[row], match.stops[row], count)
        starts.append(low)
        stops.append(high)
        repeats.append(len(low))
    return Match(
        np.concatenate(starts),
        np.concatenate(stops),
        np.repeat(match.receivers, repeats),
        tuple(h for h, n in zip(match.holders, repeats, strict=True) for _ in range(n)),
    )


def _cut(start: IntArray, stop: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Cut a box along its longest side into ``count`` nearly equal parts (fewer if too short)."""
    dim = int(np.argmax(stop - start)) if len(start) else 0
    count = min(count, int(stop[dim] - start[dim])) if len(start) else 1
    low, high = np.tile(start, (count, 1)), np.tile(stop, (count, 1))
    if count > 1:
        edges = start[dim] + (stop[dim] - start[dim]) * np.arange(count + 1) // count
        low[:, dim], high[:, dim] = edges[:-1], edges[1:]
    return low, high


def _choose_holders(match: Match, item_bytes: int, num_tensors: int, load: IntArray) -> IntArray:
    """Pick a sender for each (tensor, piece), always the holder with the least to send so far.

    Adds what it hands out to ``load``. Largest pieces first, which keeps the busiest holder
    within one piece of the mean.
    """
    sizes = match.numel() * item_bytes
    lone = np.array([len(held) == 1 for held in match.holders], dtype=bool)
    first = np.array([held[0] for held in match.holders], dtype=np.int64)
    np.add.at(load, first[lone], sizes[lone] * num_tensors)
    if lone.all():
        return first[None, :]
    senders = np.tile(first, (num_tensors, 1))
    for piece in _largest_first(np.flatnonzero(~lone), sizes):
        held, size = match.holders[piece], int(sizes[piece])
        senders[:, piece] = _least_loaded(held, load[held], size, num_tensors)
        np.add.at(load, senders[:, piece], size)
    return senders


def _largest_first(indices: IntArray, sizes: IntArray) -> Sequence[int]:
    return indices[np.argsort(-sizes[indices], kind="stable")].tolist()


def _least_loaded(held: IntArray, load: IntArray, size: int, count: int) -> IntArray:
    """Hand out ``count`` equal pieces one by one, each to the holder with the least load."""
    size = max(size, 1)
    rounds = min(count, -(-count // len(held)) + int(load.max() - load.min()) // size + 1)
    levels = load[:, None] + size * np.arange(rounds)[None, :]
    turn = np.argsort(levels.T.ravel(), kind="stable")[:count]
    return held[turn % len(held)]
