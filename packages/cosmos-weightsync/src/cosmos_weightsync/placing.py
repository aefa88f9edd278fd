"""Shards of engines that pad, replicate or scale in blocks: where a local tensor lies."""

from torch import Tensor

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.encodings.blocks import grid_box
from cosmos_weightsync.errors import LayoutError
from cosmos_weightsync.layout import ShardSpec
from cosmos_weightsync.shards import Shard, dtype_name

__all__ = ["block_scale_box", "placed_shard"]


def placed_shard(
    name: str, global_shape: tuple[int, ...], tensor: Tensor, start: tuple[int, ...]
) -> Shard:
    """A local tensor whose first element lies at ``start`` of the full one.

    What sticks out of the full tensor is padding and is left out: an embedding of 1,000 rows,
    padded to 1,024 and cut in four, holds rows 768 to 1,000 on its last rank. A rank that holds
    nothing but padding gets an empty shard.

    Raises:
        LayoutError: the tensor has another number of dims.

    Example:
        >>> local = torch.zeros(256, 64)
        >>> placed_shard("embed", (1000, 64), local, (768, 0)).spec.box
        Box(start=(768, 0), stop=(1000, 64))
    """
    if not len(global_shape) == tensor.ndim == len(start):
        raise LayoutError(f"{name}: {tuple(tensor.shape)} at {start} in a tensor of {global_shape}")
    low = tuple(map(min, start, global_shape))
    high = tuple(
        min(at + extent, whole)
        for at, extent, whole in zip(start, tensor.shape, global_shape, strict=True)
    )
    box = Box(low, tuple(map(max, low, high)))
    view = tensor[tuple(slice(0, extent) for extent in box.shape)]
    return Shard(ShardSpec(name, global_shape, box, dtype_name(tensor.dtype)), view)


def block_scale_box(weight: Box, block: tuple[int, ...]) -> Box:
    """The box of the scales that belong to a box of a weight quantised in blocks.

    There is one scale for each block of ``block`` elements, such as 128 by 128. A block that is
    only partly in the box needs its scale all the same, so two ranks may hold the same one.

    Raises:
        LayoutError: the weight has another number of dims than the block.
    """
    if len(weight.start) != len(block) or min(block) < 1:
        raise LayoutError(f"blocks of {block} in a weight of {len(weight.start)} dims")
    cells = grid_box(weight, block)
    return Box(cells.start, cells.start) if weight.is_empty else cells
