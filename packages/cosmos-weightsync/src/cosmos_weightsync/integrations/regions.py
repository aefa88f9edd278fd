"""Which boxes of a tensor a strided view of it reads: the arithmetic under `tracing`.

A view of a contiguous tensor is a shape, strides and an offset. A weight loader narrows,
transposes and reshapes what it is given, and copies the outcome somewhere; reading the strides of
the outcome back as boxes says which part of the checkpoint tensor is needed, and how to read the
values once only that part is there.

```
tensor (6, 4), view [1:3].t() ─► shape (4, 2), strides (1, 4), offset 4 ─► box [1:3, 0:4]
tensor (6, 4), view [::3]     ─► shape (2, 4), strides (12, 1)          ─► boxes [0:1], [3:4]
```
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from cosmos_weightsync.boxes import Box

__all__ = ["Region", "Strided", "boxes_of_view", "contiguous_strides", "merge_overlapping"]

MAX_BOXES = 128
"""A view that falls into more boxes than this is read as one box with holes."""


@dataclass(frozen=True, slots=True)
class Strided:
    """Elements of a storage, as `torch.as_strided` would address them."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """One box of a source tensor, and where its elements go.

    Attributes:
        box: What is needed of the source.
        source: The elements, in the coordinates of the whole contiguous source.
        target: The same elements, in the storage that they are copied into; equal shape.
    """

    box: Box
    source: Strided
    target: Strided

    def local(self, source_shape: Sequence[int]) -> Strided:
        """The elements in a contiguous tensor that holds ``box`` only."""
        whole, part = contiguous_strides(source_shape), contiguous_strides(self.box.shape)
        start = _unravel(self.source.offset, source_shape)
        inside = (at - low for at, low in zip(start, self.box.start, strict=True))
        offset = sum(at * stride for at, stride in zip(inside, part, strict=True))
        strides: list[int] = []
        for stride in self.source.strides:
            moved, left = 0, stride
            for step, local in zip(whole, part, strict=True):
                moved += left // step * local
                left %= step
            strides.append(moved)
        return Strided(self.source.shape, tuple(strides), offset)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    return tuple(math.prod(max(1, extent) for extent in shape[d + 1 :]) for d in range(len(shape)))


def boxes_of_view(source: Strided, shape: Sequence[int], target: Strided) -> list[Region]:
    """Split a copy from a view of a tensor into copies from boxes of it.

    Args:
        source: The view that is read; a stride of 0 repeats elements.
        shape: Of the whole contiguous tensor that is viewed.
        target: The view that is written, of the same shape as ``source``.

    Returns:
        Regions that together are the copy. A view that is no union of few boxes comes back as
        one region, whose box holds more than the view reads.
    """
    if math.prod(source.shape) == 0:
        return []
    dims = _split_merged(source, shape, target)
    if dims is None:
        return [Region(_bounding_box(source, shape), source, target)]
    start = _unravel(source.offset, shape)
    extents, scattered = _extents(dims, len(shape))
    spans = _spans(dims, len(shape))
    if any(low + span > high for low, span, high in zip(start, spans, shape, strict=True)):
        return [Region(_bounding_box(source, shape), source, target)]
    if math.prod(dims[i].size for i in scattered) > MAX_BOXES:
        extents, scattered = spans, []  # One box, holes included; the strides step over them.
    return list(_regions(dims, scattered, (source.offset, target.offset), (shape, extents)))


@dataclass(frozen=True, slots=True)
class _Dim:
    """One dim of a view: it walks along one dim of the source (``None``: it repeats)."""

    size: int
    source_dim: int | None
    step: int
    source_stride: int
    target_stride: int


def _split_merged(source: Strided, shape: Sequence[int], target: Strided) -> list[_Dim] | None:
    """The dims of the view, each inside one dim of the source; ``None`` if that cannot be."""
    strides = contiguous_strides(shape)
    start = _unravel(source.offset, shape)
    found: list[_Dim] = []
    for size, stride, goes in zip(source.shape, source.strides, target.strides, strict=True):
        left, scale = size, 1
        while left > 1:
            if stride == 0:
                found.append(_Dim(left, None, 0, 0, goes))
                break
            along = _walks_along(stride * scale, strides, shape)
            if along is None:
                return None
            step = stride * scale // strides[along]
            room = shape[along] if step == 1 and start[along] == 0 else shape[along] * left
            part = left if left <= room else room
            if left % part:
                return None
            found.append(_Dim(part, along, step, stride * scale, goes * scale))
            left //= part
            scale *= part
    return found


def _walks_along(stride: int, strides: Sequence[int], shape: Sequence[int]) -> int | None:
    """The source dim in which a step of ``stride`` moves, if it moves in one only."""
    for dim, (step, extent) in enumerate(zip(strides, shape, strict=True)):
        if extent > 1 and step <= stride:
            return dim if stride % step == 0 else None
    return None


def _extents(dims: Sequence[_Dim], num_dims: int) -> tuple[list[int], list[int]]:
    """The extent of one box, and which dims of the view step from one box to the next."""
    extents = [1] * num_dims
    scattered: list[int] = []
    for index in sorted(range(len(dims)), key=lambda i: dims[i].step):
        dim = dims[index]
        if dim.source_dim is None:
            continue
        if dim.step == extents[dim.source_dim]:
            extents[dim.source_dim] *= dim.size
        else:
            scattered.append(index)
    return extents, scattered


def _spans(dims: Sequence[_Dim], num_dims: int) -> list[int]:
    """The extent of the box that holds everything the view reads."""
    spans = [1] * num_dims
    for dim in dims:
        if dim.source_dim is not None:
            spans[dim.source_dim] += (dim.size - 1) * dim.step
    return spans


def _regions(
    dims: Sequence[_Dim],
    scattered: Sequence[int],
    offsets: tuple[int, int],
    sides: tuple[Sequence[int], Sequence[int]],
) -> Iterator[Region]:
    shape, extents = sides
    kept = [dim for index, dim in enumerate(dims) if index not in scattered]
    sizes = tuple(dim.size for dim in kept)
    from_strides = tuple(dim.source_stride for dim in kept)
    to_strides = tuple(dim.target_stride for dim in kept)
    for at in product(*(range(dims[index].size) for index in scattered)):
        moves = [(count, dims[index]) for count, index in zip(at, scattered, strict=True)]
        offset = offsets[0] + sum(count * dim.source_stride for count, dim in moves)
        goes = offsets[1] + sum(count * dim.target_stride for count, dim in moves)
        start = _unravel(offset, shape)
        stop = tuple(low + extent for low, extent in zip(start, extents, strict=True))
        yield Region(
            Box(start, stop), Strided(sizes, from_strides, offset), Strided(sizes, to_strides, goes)
        )


def _bounding_box(view: Strided, shape: Sequence[int]) -> Box:
    """A box whose inner dims are whole, so that offsets inside it are those of the tensor."""
    last = view.offset + sum(
        (size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)
    )
    low, high = _unravel(view.offset, shape), _unravel(last, shape)
    cut = next((d for d, (a, b) in enumerate(zip(low, high, strict=True)) if a != b), len(shape))
    start = (*low[: cut + 1], *(0 for _ in shape[cut + 1 :]))
    stop = (*(at + 1 for at in high[: cut + 1]), *shape[cut + 1 :])
    return Box(start, stop)


def merge_overlapping(boxes: Iterable[Box]) -> list[Box]:
    """The same elements in boxes that do not overlap, holes between overlapping ones included."""
    merged: list[Box] = []
    for box in sorted(set(boxes)):
        while clash := next((other for other in merged if other.intersect(box)), None):
            merged.remove(clash)
            box = Box(
                tuple(map(min, box.start, clash.start)), tuple(map(max, box.stop, clash.stop))
            )
        merged.append(box)
    return merged


def _unravel(offset: int, shape: Sequence[int]) -> tuple[int, ...]:
    strides = contiguous_strides(shape)
    found: list[int] = []
    for stride in strides:
        found.append(offset // stride)
        offset %= stride
    return tuple(found)
