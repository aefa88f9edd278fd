"""Block maxima of whole tensors, however these are cut: what makes quantisation exact.

A scale belongs to a block of the whole tensor. Where a shard holds a part of a block only, the
ranks that hold the rest are asked for their maximum, once per publish and for all cut blocks
together; a rank then encodes its part exactly as a rank that holds everything would.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.encodings.blocks import cut_cells, grid_box, grid_shape
from cosmos_weightsync.encodings.contract import Extents
from cosmos_weightsync.errors import EncodingError
from cosmos_weightsync.layout import IntArray, Layout, ShardSpec
from cosmos_weightsync.shards import Shard

__all__ = ["AmaxGroup", "BlockMaxima", "BlockRules", "CutBlocks", "check_finite"]


@dataclass(frozen=True, slots=True)
class AmaxGroup:
    """The ranks whose shards together make whole blocks.

    Every rank of the group publishes the same versions in the same order, since each publish
    calls ``reduce_max`` once.

    Attributes:
        layout: What every rank of the group holds; the same object on every rank.
        reduce_max: Replaces a 1-dimensional float32 tensor by its maximum over the group, in
            place; with torch, an all-reduce.
    """

    layout: Layout
    reduce_max: Callable[[Tensor], None]

    @classmethod
    def of_process_group(
        cls, shards: Iterable[Shard], group: dist.ProcessGroup | None = None
    ) -> "AmaxGroup":
        """From the shards of every rank of a torch process group; all of them call this."""
        own = json.dumps(Layout.from_ranks([[shard.spec for shard in shards]]).to_json())
        parts: list[str] = [""] * dist.get_world_size(group)
        dist.all_gather_object(parts, own, group=group)
        layout = Layout.merge([Layout.from_json(json.loads(part)) for part in parts])
        device = "cpu" if "gloo" in dist.get_backend(group) else "cuda"

        def reduce_max(values: Tensor) -> None:
            there = values.to(device)
            dist.all_reduce(there, dist.ReduceOp.MAX, group=group)
            values.copy_(there)

        return cls(layout, reduce_max)


@dataclass(frozen=True, slots=True)
class BlockMaxima:
    """The maxima of one shard's blocks: a grid in the coordinates of ``block``."""

    shard: Shard
    block: Extents
    grid: Tensor


class BlockRules(NamedTuple):
    """Of every tensor to quantise, on any rank of the group: its blocks, and who shares them."""

    blocks: Callable[[ShardSpec], tuple[Extents, ...]]
    together: Callable[[ShardSpec], tuple[str, ...]]


class CutBlocks:
    """The blocks that no single shard holds whole, or that tensors share, numbered alike anywhere.

    Args:
        rules: what tensors have.
        own: This rank's specs.
        group: The ranks that hold the rest; ``None`` when this rank's shards suffice.

    Raises:
        EncodingError: a block is cut, and nobody is known who holds the rest.
    """

    def __init__(
        self,
        rules: BlockRules,
        own: Sequence[ShardSpec],
        group: AmaxGroup | None,
    ) -> None:
        self._group = group
        layout = Layout.from_ranks([own]) if group is None else group.layout
        self._slots: dict[tuple[str, Extents], tuple[int, IntArray]] = {}
        self._shared: dict[tuple[str, Extents], int] = {}
        self._families: dict[str, tuple[int, Extents]] = {}
        known: dict[tuple[int, Extents], IntArray] = {}
        self.num_slots = 0
        for name in sorted(layout.tensors):
            entry = layout.tensors[name]
            shape = layout.shape_of(name)
            whole = ShardSpec(name, shape, Box.full(shape), entry.dtype)
            for block, family in zip(rules.blocks(whole), rules.together(whole), strict=True):
                key = (entry.geometry, block)
                if key not in known:
                    boxes = _distinct_boxes(layout, entry.geometry)
                    known[key] = _cut_by(name, shape, boxes, block, group)
                if family:
                    self._shared[name, block] = self._slots_of(family, name, shape, block)
                else:
                    self._slots[name, block] = (self.num_slots, known[key])
                    self.num_slots += len(known[key])

    def _slots_of(self, family: str, name: str, shape: Extents, block: Extents) -> int:
        """Return the first slot of the blocks that a family shares, one for each of them."""
        grid = grid_shape(shape, block)
        if family not in self._families:
            self._families[family] = (self.num_slots, grid)
            self.num_slots += math.prod(grid)
        first, expected = self._families[family]
        if grid != expected:
            raise EncodingError(
                f"{name} {shape}: has {grid} blocks to share with {family}, others {expected}"
            )
        return first

    def complete(self, found: Sequence[BlockMaxima]) -> None:
        """Turn maxima over this rank's parts into maxima over whole blocks, in place.

        Calls the group's ``reduce_max`` exactly once where there is a group with cut blocks.

        Raises:
            EncodingError: a block holds infinity or NaN, here or on another rank.
        """
        # The last slot says whether some rank saw a value that is not finite.
        whole = torch.zeros(self.num_slots + 1, dtype=torch.float32)
        reason = _first_not_finite(found)
        if reason:
            whole[-1] = 1.0
        places = [self._places(item) for item in found]
        for item, (slots, local) in zip(found, places, strict=True):
            if len(slots):
                values = item.grid.flatten()[local.to(item.grid.device)].cpu()
                whole[slots] = torch.maximum(whole[slots], values.nan_to_num(0.0, 0.0))
        if self._group is not None and self.num_slots:
            self._group.reduce_max(whole)
        if reason or float(whole[-1]) > 0:
            raise EncodingError(
                reason or "another rank of the group has values that are not finite"
            )
        for item, (slots, local) in zip(found, places, strict=True):
            if len(slots):
                flat = item.grid.view(-1)
                flat[local.to(flat.device)] = whole[slots].to(flat.device)

    def _places(self, item: BlockMaxima) -> tuple[Tensor, Tensor]:
        """Numbers of the shard's cut blocks, and where they are in its grid."""
        spec = item.shard.spec
        if (spec.name, item.block) in self._shared:
            grid = grid_shape(spec.global_shape, item.block)
            mine = grid_box(spec.box, item.block).relative_to(Box.full(grid))
            numbers = np.arange(math.prod(grid), dtype=np.int64).reshape(grid)[mine]
            slots = self._shared[spec.name, item.block] + numbers.ravel()
            return torch.from_numpy(slots), torch.arange(len(slots))
        first, positions = self._slots[spec.name, item.block]
        if not len(positions):
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        cut, local, _ = cut_cells(spec.global_shape, spec.box, item.block)
        slots = first + np.searchsorted(positions, cut)
        return torch.from_numpy(slots), torch.from_numpy(local)


def _distinct_boxes(layout: Layout, geometry: int) -> list[Box]:
    cut = layout.geometries[geometry]
    rows = zip(cut.starts.tolist(), cut.stops.tolist(), strict=True)
    return sorted({Box(tuple(low), tuple(high)) for low, high in rows})


def _cut_by(
    name: str, shape: Extents, boxes: Sequence[Box], block: Extents, group: AmaxGroup | None
) -> IntArray:
    """Positions in the grid of the blocks that lie in several boxes, sorted."""
    cuts = [cut_cells(shape, box, block) for box in boxes]
    positions = np.unique(np.concatenate([np.zeros(0, np.int64), *(cut[0] for cut in cuts)]))
    held = np.zeros(len(positions), dtype=np.int64)
    for position, _, volume in cuts:
        np.add.at(held, np.searchsorted(positions, position), volume)
    corners = np.unravel_index(positions, grid_shape(shape, block)) if shape else ()
    volume = np.ones(len(positions), dtype=np.int64)
    for index, size, extent in zip(corners, block, shape, strict=True):
        volume *= np.minimum((index + 1) * size, extent) - index * size
    missing = np.flatnonzero(held < volume)
    if len(missing):
        corner = [int(index[missing[0]]) for index in corners]
        cell = Box(
            tuple(index * size for index, size in zip(corner, block, strict=True)),
            tuple(min((i + 1) * b, e) for i, b, e in zip(corner, block, shape, strict=True)),
        )
        raise EncodingError(_advice(name, shape, cell, boxes, group))
    return positions


def _advice(
    name: str, shape: Extents, cell: Box, boxes: Sequence[Box], group: AmaxGroup | None
) -> str:
    touching = next(box for box in boxes if box.intersect(cell) is not None)
    if group is not None:
        return f"{name} {shape}: no rank of the group holds all of block {cell}"
    wide = ["x".join(str(extent) for extent in cell.shape)]
    return (
        f"{name} {shape}: this rank's shard {touching} cuts block {cell}, whose scale needs the "
        f"rest of it; shard on multiples of the block ({wide[0]}), or hand over the ranks that "
        "hold the rest as group=AmaxGroup.of_process_group(shards)"
    )


def check_finite(found: Sequence[BlockMaxima]) -> None:
    """Refuse maxima of blocks that hold infinity or NaN.

    Raises:
        EncodingError: names the first such block.
    """
    reason = _first_not_finite(found)
    if reason:
        raise EncodingError(reason)


def _first_not_finite(found: Sequence[BlockMaxima]) -> str:
    for item in found:
        if bool(torch.isfinite(item.grid).all()):
            continue
        spec = item.shard.spec
        cell = (~torch.isfinite(item.grid)).nonzero()[0].tolist()
        first = tuple(low // size for low, size in zip(spec.box.start, item.block, strict=True))
        start = tuple((i + f) * b for i, f, b in zip(cell, first, item.block, strict=True))
        stop = tuple(low + size for low, size in zip(start, item.block, strict=True))
        where = Box(start, stop).intersect(spec.box)
        return f"{spec.name} {where}: holds infinity or NaN, which has no scale"
    return ""
