"""Reading from the safetensors of a directory what one rank holds of a tensor, and no more."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from cosmos_parallel.errors import ModelMismatchError

Region = tuple[slice, ...]


def held_region(tensor: Tensor) -> Region:
    """Return which part of the whole tensor this rank holds, where that is a single box."""
    ((region, _),) = held_pieces(tensor)
    return region


def held_pieces(tensor: Tensor) -> list[tuple[Region, Tensor]]:
    """Return the boxes of the whole tensor that this rank holds, and the memory of each.

    There are several where the rank has features of gate and the same of up, which are one tensor.
    """
    part = held_part(tensor)
    pieces: list[tuple[Region, Tensor]] = []
    for runs in product(*map(_runs, _held_rows(tensor))):
        inside = tuple(own for _, own in runs)
        pieces.append((tuple(whole for whole, _ in runs), part[inside]))
    return pieces


def _held_rows(tensor: Tensor) -> list[Tensor]:
    """Return the indices of the whole tensor that this rank holds on each dim.

    On each dim, axes that split the whole come first; then those of FSDP, which splits what tensor
    or expert parallelism left although it is the outer axis of the mesh (a strided shard). A
    strided shard by itself has a piece of each of so many equal blocks.
    """
    rows = [torch.arange(size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return rows
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    splits = [
        (placement, axis)
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    ]
    splits.sort(key=lambda split: type(split[0]) is not Shard)
    taken: set[int] = set()
    for placement, axis in splits:
        dim: int = getattr(placement, "dim")  # noqa: B009 - a strided shard is no public type
        num_blocks: int = 1 if dim in taken else getattr(placement, "split_factor", 1)
        blocks = rows[dim].chunk(num_blocks)
        rows[dim] = torch.cat([_nth(block, mesh.size(axis), coordinate[axis]) for block in blocks])
        taken.add(dim)
    return rows


def _nth(block: Tensor, num_pieces: int, index: int) -> Tensor:
    pieces = block.chunk(num_pieces)
    return pieces[index] if index < len(pieces) else block[:0]


def _runs(rows: Tensor) -> list[tuple[slice, slice]]:
    """Return where rows follow one another: in the whole tensor, and in what holds just them."""
    if not len(rows):
        return [(slice(0, 0), slice(0, 0))]
    ends = [*(torch.nonzero(rows.diff() != 1).flatten() + 1).tolist(), len(rows)]
    return [
        (slice(int(rows[start]), int(rows[end - 1]) + 1), slice(start, end))
        for start, end in pairwise([0, *ends])
    ]


def held_part(tensor: Tensor) -> Tensor:
    """Return the memory of this rank's part, to be written to."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def mismatch_error(path: Path, problems: Sequence[str]) -> ModelMismatchError:
    """Say which weights a directory lacks or has in another shape."""
    return ModelMismatchError(
        f"model directory {path}: {'; '.join(problems[:5])}{' ...' if len(problems) > 5 else ''}; "
        "its *.safetensors are not of the model that config.json describes"
    )


class WeightFiles:
    """The safetensors of a directory, open inside a ``with`` block."""

    def __init__(self, path: Path) -> None:
        """Take the directory; nothing is opened yet."""
        self._path = path
        self._open = ExitStack()
        self._holding: dict[str, Any] = {}

    def __enter__(self) -> "WeightFiles":
        """Open every file.

        Raises:
            ModelMismatchError: if one cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        for file in sorted(self._path.glob("*.safetensors")):
            try:
                opened = self._open.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelMismatchError(f"{file} cannot be read: {error}") from error
            self._holding |= dict.fromkeys(opened.keys(), opened)
        return self

    def __exit__(self, *_: object) -> None:
        """Close them."""
        self._open.close()

    @property
    def names(self) -> Sequence[str]:
        """Names of all tensors, file after file."""
        return list(self._holding)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that is there."""
        return tuple(self._holding[name].get_slice(name).get_shape())

    def whole(self, name: str) -> Tensor:
        """Return a tensor that is there."""
        return self._holding[name].get_tensor(name)

    def read(self, stored: Mapping[str, Tensor], region: Region, target: Tensor) -> list[str]:
        """Copy a region into ``target``; return what is wrong.

        Args:
            stored: the tensor itself, or the matrices that it is a stack of, as the files should
                have them.
            region: which part of the tensor, or of the stack, to read.
            target: as large as the region.
        """
        problems: list[str] = []
        names = list(stored)
        is_stack = len(region) > len(next(iter(stored.values())).shape) if stored else False
        for index, name in enumerate(names[region[0]] if is_stack else names):
            opened = self._holding.get(name)
            if opened is None:
                problems.append(f"missing weights: {name}")
                continue
            part = opened.get_slice(name)
            shape, expected = tuple(part.get_shape()), tuple(stored[name].shape)
            if shape != expected:
                problems.append(
                    f"mismatched weights: {name} is {shape}, the config says {expected}"
                )
                continue
            # a tensor without dims has no slices
            found = part[region[1:] if is_stack else region] if shape else self.whole(name)
            (target[index] if is_stack else target).copy_(found)
        return problems
