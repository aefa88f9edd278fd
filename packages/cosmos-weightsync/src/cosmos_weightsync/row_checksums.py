"""Copying a tensor and hashing boxes of it in one pass, as two receivers of halves want them.

```
            columns 0:1024   1024:2048
rows 0:64   copy+hash A  │               first all rows of box A, then all of box B;
rows 64:128 copy+hash A  │ copy+hash B   what no box covers is copied, what two cover is hashed
```
Where values are cast on the way, or lie in no rows, the tensor is written by bands of rows, and
boxes are hashed while the cache still holds the band.

Columns that are sent out of a tensor as it lies have to be packed for each reader. Where boxes are
columns, and leave nothing over, the memory of the tensor can have them one after another instead:
```
as the tensor lies   A A A B B │ A A A B B │ …        box by box   A A A │ A A A │ … B B │ B B │ …
```
"""

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from cosmos_weightsync.arenas import ALIGNMENT
from cosmos_weightsync.boxes import Box, subtract_all
from cosmos_weightsync.byte_rows import flat_bytes, lent_bytes
from cosmos_weightsync.checksums import BLOCK_BYTES, RunningChecksum
from cosmos_weightsync.streaming import RowMove, row_engine

__all__ = ["RowChecksums"]

Area = tuple[slice, slice]
"""Rows, and of each a stretch of bytes."""


class RowChecksums:
    """Fills one tensor, time and again, and has the checksums of boxes inside it.

    Args:
        tensor: Contiguous, in host memory.
        boxes: As slices of the tensor, without steps.
        may_arrange: Whether its memory may have the boxes one after another where it is copied.

    Attributes:
        blocks: Of the tensor's memory, where each box is copied to; ``None`` if the tensor is
            copied as it lies.
    """

    def __init__(
        self, tensor: Tensor, boxes: Sequence[tuple[slice, ...]], *, may_arrange: bool = False
    ) -> None:
        self._tensor = tensor if tensor.dim() else tensor.view(1)
        num_rows = self._tensor.shape[0]
        self._rows = _raw(tensor).reshape(num_rows, tensor.nbytes // max(1, num_rows))
        self._boxes = [box or (slice(0, 1),) for box in boxes]
        self._areas = [_area_of(box, self._tensor) for box in self._boxes]
        self._alone, self._left = _disjoint(self._areas, Box.full(self._rows.shape))
        self._values: list[int] = []
        can_arrange = may_arrange and not self._left and len(self._alone) == len(self._areas)
        self.blocks = self._arranged() if can_arrange else None

    def copy(self, source: Tensor) -> None:
        """Copy a tensor of the same shape, in host memory, of any strides; casts if need be."""
        moves = self.moves(source)
        if moves is None:
            self._values = self._copied_by_bands(source if source.dim() else source.view(1))
        else:
            self._values = row_engine().prepare(moves).make()[len(self._left) :]

    def moves(self, source: Tensor) -> list[RowMove] | None:
        """What copies a tensor as it lies: the last ones hash the boxes, in order.

        Returns:
            ``None`` if it cannot be copied so: `copy` takes longer ways.
        """
        is_plain = source.dtype == self._tensor.dtype and source.is_contiguous()
        if not is_plain or None in self._areas:
            return None
        rows = _raw(source).reshape(self._rows.shape)
        moves = [RowMove(rows[area], self._rows[area], is_hashed=False) for area in self._left]
        for number, area in enumerate(self._areas):
            assert area is not None
            into = self._rows[area] if number in self._alone else None
            if self.blocks is not None:
                into = _raw(self.blocks[number]).reshape(rows[area].shape)
            moves.append(RowMove(rows[area], into))
        return moves

    def written(self) -> None:
        """Somebody else has filled the tensor, as it lies."""
        runnings = self._start()
        self._add(runnings, 0, len(self._rows))
        self._values = [running.value for running in runnings]

    @property
    def values(self) -> list[int]:
        """One for each box, of what was written last."""
        return self._values

    def _copied_by_bands(self, source: Tensor) -> list[int]:
        runnings = self._start()
        num_rows = len(self._rows)
        step = max(1, BLOCK_BYTES // max(1, self._rows.shape[1]))
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            if self.blocks is None:
                self._tensor[start:stop].copy_(source[start:stop])
                self._add(runnings, start, stop)
                continue
            for number, low, high in self._parts(start, stop):
                first, *columns = self._boxes[number]
                part = self.blocks[number][low - first.start : high - first.start]
                runnings[number].add(part.copy_(source[low:high, *columns]))
        return [running.value for running in runnings]

    def _arranged(self) -> list[Tensor] | None:
        """The tensor's memory box by box, where some are columns and none has an odd length."""
        flat, start = flat_bytes(self._tensor), 0
        blocks: list[Tensor] = []
        has_columns = False
        for box, area in zip(self._boxes, self._areas, strict=True):
            assert area is not None
            num_rows, width = (part.stop - part.start for part in area)
            if num_rows * width % ALIGNMENT:
                return None
            has_columns |= num_rows > 1 and width < self._rows.shape[1]
            block = flat[start : start + num_rows * width].view(self._tensor.dtype)
            blocks.append(block.view([part.stop - part.start for part in box]))
            start += num_rows * width
        return blocks if has_columns else None

    def _start(self) -> list[RunningChecksum]:
        return [RunningChecksum() for _ in self._boxes]

    def _add(self, runnings: Sequence[RunningChecksum], start: int, stop: int) -> None:
        """Carry on over rows ``start:stop``."""
        for number, low, high in self._parts(start, stop):
            area, running = self._areas[number], runnings[number]
            if area is not None:
                running.add_bytes(np.ascontiguousarray(self._rows[low:high, area[1]]))
            else:
                part = self._tensor[low:high, *self._boxes[number][1:]]
                running.add(part.contiguous())

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The boxes, by number, that have some of rows ``start:stop``, and which of these."""
        for number, (rows, *_) in enumerate(self._boxes):
            low, high = max(start, rows.start), min(stop, rows.stop)
            if low < high:
                yield number, low, high


def _area_of(box: tuple[slice, ...], tensor: Tensor) -> Area | None:
    """The box as rows of bytes; ``None`` if it takes several stretches of a row."""
    rows, *rest = box
    if [part.stop - part.start for part in rest[1:]] != list(tensor.shape[2:]):
        return None
    width = tensor.element_size() * (tensor.stride(1) if tensor.dim() > 1 else 1)
    columns = rest[0] if rest else slice(0, 1)
    return rows, slice(columns.start * width, columns.stop * width)


def _disjoint(areas: Sequence[Area | None], whole: Box) -> tuple[set[int], list[Area]]:
    """Areas, by number, that do not touch each other, and what is left between them."""
    alone: dict[int, Box] = {}
    for number, area in enumerate(areas):
        if area is None:
            continue
        box = Box(*zip(*((part.start, part.stop) for part in area), strict=True))
        if all(box.intersect(other) is None for other in alone.values()):
            alone[number] = box
    left = subtract_all(whole, alone.values()) if 0 not in whole.shape else []
    return set(alone), [(slice(*rows), slice(*columns)) for rows, columns in map(_spans, left)]


def _spans(box: Box) -> list[tuple[int, int]]:
    return list(zip(box.start, box.stop, strict=True))


def _raw(tensor: Tensor) -> np.ndarray:
    return lent_bytes(flat_bytes(tensor.detach()))
