"""Filling the tensors of a snapshot, and hashing the boxes of them that will be asked for.

All that is copied as it lies is one prepared list of moves, made in one call: what a tensor costs
beside its bytes is a line of that list.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.layout import ShardSpec
from cosmos_weightsync.row_checksums import RowChecksums
from cosmos_weightsync.streaming import Moves, RowMove, row_engine
from cosmos_weightsync.version_checksums import ExpectedBoxes

__all__ = ["FollowedTensors", "Placed"]

Placed = tuple[str, Box, Tensor]
"""Tensor name and box, and the memory of that."""
Places = list[tuple[int, bool]]
"""The addresses of tensors, and whether each is to be copied as it lies."""


@dataclass(eq=False, slots=True)
class _Prepared:
    """Moves that fill several tensors, for sources at the places they were prepared for.

    Attributes:
        indices: Which tensors.
        places: Of their sources.
        moves: For those that are copied as they lie.
        hashed: Each of these tensors, and which of the moves hash its boxes.
        others: The other tensors, with the positions of their sources.
    """

    indices: tuple[int, ...]
    places: Places
    moves: Moves
    hashed: list[tuple[int, slice]]
    others: list[tuple[int, int]]


class FollowedTensors:
    """The tensors of one snapshot. Used by one thread.

    Args:
        tensors: Contiguous, in host memory if anything is to be hashed.
        specs: What each of them is.
        may_arrange: Whether columns that will be asked for may lie one after another in the memory
            of a tensor, where these are all of it; see `cosmos_weightsync.row_checksums`.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        specs: Sequence[ShardSpec],
        *,
        may_arrange: bool = False,
    ) -> None:
        self._tensors = tensors
        self._specs = specs
        self._may_arrange = may_arrange
        self._copied: frozenset[int] = frozenset()
        self._placed: Sequence[Placed] | None = None
        self._expected: ExpectedBoxes | None = None
        self._numbers: dict[int, list[int]] = {}
        self._rows: dict[int, RowChecksums] = {}
        self._prepared: _Prepared | None = None
        self._values: dict[int, int] = {}

    @property
    def values(self) -> Mapping[int, int]:
        """Of what was written last, by the number of the box in `ExpectedBoxes.keys`."""
        return self._values

    @property
    def placed(self) -> Sequence[Placed]:
        """Where everything that was written last lies; the same list as long as that is so."""
        if self._placed is None:
            self._placed = [place for index in range(len(self._specs)) for place in self._of(index)]
        return self._placed

    def expect(self, expected: ExpectedBoxes) -> None:
        """Another version will be written, of which these boxes are to be hashed."""
        self._values = {}
        if self._expected is not None and self._expected.keys == expected.keys:
            return
        self._expected = expected
        self._rows, self._prepared = {}, None
        self._copied, self._placed = frozenset(), None
        by_name: dict[str, list[int]] = {}
        for number, (name, _) in enumerate(expected.keys):
            by_name.setdefault(name, []).append(number)
        for index, spec in enumerate(self._specs):
            self._numbers[index] = [
                number
                for number in by_name.get(spec.name, ())
                if spec.box.contains(expected.keys[number][1])
            ]

    def copy(self, indices: Sequence[int], sources: Sequence[Tensor]) -> None:
        """Copy sources in host memory into these tensors; casts where the dtype differs."""
        indices = tuple(indices)
        places = [(source.data_ptr(), source.is_contiguous()) for source in sources]
        prepared = self._prepared
        if prepared is None or (prepared.indices, prepared.places) != (indices, places):
            prepared = self._prepared = self._prepare(indices, sources, places)
        values = prepared.moves.make()
        for index, part in prepared.hashed:
            self._keep(index, values[part])
        for index, position in prepared.others:
            rows = self._followed(index)
            rows.copy(sources[position])
            self._keep(index, rows.values)
        if not self._copied.issuperset(indices):
            self._copied, self._placed = self._copied.union(indices), None

    def written(self, index: int) -> None:
        """Somebody else has filled this tensor, as it lies."""
        if index in self._copied:
            self._copied, self._placed = self._copied - {index}, None
        rows = self._followed(index)
        rows.written()
        self._keep(index, rows.values)

    def _prepare(
        self, indices: tuple[int, ...], sources: Sequence[Tensor], places: Places
    ) -> _Prepared:
        moves: list[RowMove] = []
        hashed: list[tuple[int, slice]] = []
        others: list[tuple[int, int]] = []
        for position, (index, source) in enumerate(zip(indices, sources, strict=True)):
            found = self._followed(index).moves(source)
            if found is None:
                others.append((index, position))
                continue
            moves += found
            if self._numbers[index]:
                hashed.append((index, slice(len(moves) - len(self._numbers[index]), len(moves))))
        return _Prepared(indices, places, row_engine().prepare(moves), hashed, others)

    def _followed(self, index: int) -> RowChecksums:
        if index not in self._rows:
            assert self._expected is not None
            spec = self._specs[index]
            boxes = [self._expected.keys[number][1] for number in self._numbers[index]]
            parts = [box.relative_to(spec.box) for box in boxes]
            self._rows[index] = RowChecksums(
                self._tensors[index], parts, may_arrange=self._may_arrange
            )
        return self._rows[index]

    def _of(self, index: int) -> list[Placed]:
        spec = self._specs[index]
        blocks = self._rows[index].blocks if index in self._copied else None
        if blocks is None or self._expected is None:
            return [(spec.name, spec.box, self._tensors[index])]
        boxes = [self._expected.keys[number][1] for number in self._numbers[index]]
        return [(spec.name, box, block) for box, block in zip(boxes, blocks, strict=True)]

    def _keep(self, index: int, values: Sequence[int]) -> None:
        self._values.update(zip(self._numbers[index], values, strict=True))
