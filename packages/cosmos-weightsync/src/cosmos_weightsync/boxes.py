"""Axis-aligned boxes in the coordinates of a full tensor: the one geometric idea of this library.

A shard of a tensor is a box; what two shards share is the intersection of their boxes; what is
still missing is a difference of boxes.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import eq, ge, le, sub

from cosmos_weightsync.errors import LayoutError

__all__ = ["Box", "subtract_all"]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The half-open region ``start[d] <= x[d] < stop[d]`` of a tensor of ``len(start)`` dims.

    The box of a 0-dimensional tensor is ``Box((), ())`` and holds one element. A box with
    ``start[d] == stop[d]`` in some dim is empty.

    Raises:
        LayoutError: the corners have different lengths, or a side is negative.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise LayoutError(f"box corners {self.start} and {self.stop} differ in length")
        if any(not 0 <= low <= high for low, high in zip(self.start, self.stop, strict=True)):
            raise LayoutError(f"box {self.start}:{self.stop} needs 0 <= start <= stop in every dim")

    @classmethod
    def full(cls, shape: Iterable[int]) -> "Box":
        """The box of a whole tensor of this shape."""
        stop = tuple(shape)
        return cls((0,) * len(stop), stop)

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent in every dim."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        """How many elements lie inside."""
        return math.prod(map(sub, self.stop, self.start))

    @property
    def is_empty(self) -> bool:
        """Whether no element lies inside."""
        return any(map(eq, self.start, self.stop))

    def contains(self, other: "Box") -> bool:
        """Whether every element of ``other`` lies inside; an empty box lies inside any."""
        return other.is_empty or (
            len(self.start) == len(other.start)
            and all(map(le, self.start, other.start))
            and all(map(ge, self.stop, other.stop))
        )

    def intersect(self, other: "Box") -> "Box | None":
        """The elements in both boxes, or ``None`` when there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(low >= high for low, high in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def subtract(self, other: "Box") -> tuple["Box", ...]:
        """This box without ``other``, as at most ``2 * ndim`` disjoint boxes.

        Example:
            ``Box((0, 0), (4, 4)).subtract(Box((1, 1), (3, 3)))`` is the row band above, the row
            band below, and the two blocks left and right of the hole.
        """
        shared = self.intersect(other)
        if shared is None:
            return () if self.is_empty else (self,)
        rest: list[Box] = []
        low, high = list(self.start), list(self.stop)
        for dim in range(len(low)):
            if low[dim] < shared.start[dim]:
                stop = (*high[:dim], shared.start[dim], *high[dim + 1 :])
                rest.append(Box(tuple(low), stop))
            if shared.stop[dim] < high[dim]:
                start = (*low[:dim], shared.stop[dim], *low[dim + 1 :])
                rest.append(Box(start, tuple(high)))
            low[dim], high[dim] = shared.start[dim], shared.stop[dim]
        return tuple(rest)

    def relative_to(self, origin: "Box") -> tuple[slice, ...]:
        """Slices that select this box from a tensor that holds ``origin``.

        Raises:
            LayoutError: this box does not lie inside ``origin``.
        """
        if not origin.contains(self):
            raise LayoutError(f"{self} does not lie inside {origin}")
        base = origin.start
        return tuple(map(slice, map(sub, self.start, base), map(sub, self.stop, base)))

    def split(self, max_numel: int) -> Iterator["Box"]:
        """Cut into boxes of at most ``max_numel`` elements, in row-major order.

        Reading the parts one after the other, each in row-major order, reads the box in row-major
        order; a running checksum therefore does not see the cuts.
        """
        if max_numel < 1:
            raise LayoutError(f"cannot cut a box into parts of {max_numel} elements")
        if self.numel <= max_numel:
            yield self
            return
        dim = next(d for d, extent in enumerate(self.shape) if extent > 1)
        rows = max(1, max_numel // math.prod(self.shape[dim + 1 :]))
        for low in range(self.start[dim], self.stop[dim], rows):
            high = min(low + rows, self.stop[dim])
            part = Box(
                (*self.start[:dim], low, *self.start[dim + 1 :]),
                (*self.stop[:dim], high, *self.stop[dim + 1 :]),
            )
            yield from part.split(max_numel)

    def __str__(self) -> str:
        if not self.start:
            return "[scalar]"
        sides = zip(self.start, self.stop, strict=True)
        return "[" + ", ".join(f"{low}:{high}" for low, high in sides) + "]"


def subtract_all(box: Box, holes: Iterable[Box]) -> tuple[Box, ...]:
    """What is left of ``box`` after taking away every hole, as disjoint boxes."""
    rest: tuple[Box, ...] = () if box.is_empty else (box,)
    for hole in holes:
        rest = tuple(part for whole in rest for part in whole.subtract(hole))
    return rest
