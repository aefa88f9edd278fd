"""Copying a tensor by bands of rows, and hashing boxes of it while the cache still holds the band.

```
rows 0:64    copy │ hash box A │ hash box B
rows 64:128              copy │ hash box A │ hash box B        A and B: what two receivers want
```
A band is read from memory once and hashed out of the processor's cache; hashing a tensor after it
was written would read all of it again.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from cosmos_weightsync.checksums import BLOCK_BYTES, RunningChecksum

__all__ = ["RowChecksums", "RowsWritten", "copy_by_rows", "num_rows_of"]

RowsWritten = Callable[[int, int], None]
"""Called with the first row that was written and the one after the last; bands come in order."""


def copy_by_rows(source: Tensor, into: Tensor, written: RowsWritten) -> None:
    """Copy in bands small enough for the cache; casts where the dtypes differ.

    Args:
        source: In host memory, of any strides.
        into: Contiguous, of the same shape, in host memory.
        written: Told of every band.
    """
    num_rows = num_rows_of(into)
    if num_rows == 0:
        return
    row_bytes = into.nbytes // num_rows
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    if source.dtype == into.dtype and source.is_contiguous():
        raw, target = _raw(source), _raw(into)
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            band = slice(start * row_bytes, stop * row_bytes)
            np.copyto(target[band], raw[band])
            written(start, stop)
        return
    source, into = torch.atleast_1d(source), torch.atleast_1d(into)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        into[start:stop].copy_(source[start:stop])
        written(start, stop)


def num_rows_of(tensor: Tensor) -> int:
    """The extent of the first dim; a scalar has one row."""
    return int(tensor.shape[0]) if tensor.dim() else 1


class RowChecksums:
    """The checksums of boxes inside one tensor, carried on as its rows are written.

    Args:
        tensor: Contiguous, in host memory.
        boxes: As slices of the tensor, without steps.
    """

    def __init__(self, tensor: Tensor, boxes: Sequence[tuple[slice, ...]]) -> None:
        self._tensor = tensor if tensor.dim() else tensor.view(1)
        num_rows = num_rows_of(tensor)
        self._rows = _raw(tensor).reshape(num_rows, tensor.nbytes // max(1, num_rows))
        self._parts = [_Part(box, self._tensor) for box in boxes]

    def restart(self) -> None:
        """The tensor is about to be written again."""
        for part in self._parts:
            part.running = RunningChecksum()

    def written(self, start: int, stop: int) -> None:
        """Rows ``start:stop`` were written, and all those before."""
        for part in self._parts:
            low, high = max(start, part.rows.start), min(stop, part.rows.stop)
            if low >= high:
                continue
            if part.columns is not None:
                content = self._rows[low:high, part.columns]
                part.running.add_bytes(np.ascontiguousarray(content))
            else:
                part.running.add(self._tensor[low:high, *part.rest].contiguous())

    @property
    def values(self) -> list[int]:
        """One for each box, once all rows were written."""
        return [part.running.value for part in self._parts]


class _Part:
    """A box: its rows, and of each row a stretch of bytes, or slices where it is no stretch."""

    def __init__(self, box: tuple[slice, ...], tensor: Tensor) -> None:
        self.rows, *self.rest = box or (slice(0, 1),)
        self.running = RunningChecksum()
        self.columns: slice | None = None
        inner = [part.stop - part.start for part in self.rest[1:]]
        if inner == list(tensor.shape[2:]):
            width = tensor.element_size() * (tensor.stride(1) if tensor.dim() > 1 else 1)
            first = self.rest[0] if self.rest else slice(0, 1)
            self.columns = slice(first.start * width, first.stop * width)


def _raw(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor if tensor.dim() else tensor.view(1)).view(torch.uint8).numpy().reshape(-1)
