"""Reading from the safetensors of a directory what one rank holds of a tensor, and no more."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from cosmos_parallel.errors import ModelMismatchError

Region = tuple[slice, ...]


def held_region(tensor: Tensor) -> Region:
    """Return which part of the whole tensor this rank holds.

    On each dim, axes that split the whole come first; then those of FSDP, which splits what tensor
    or expert parallelism left although it is the outer axis of the mesh (a strided shard).
    """
    rows = [torch.arange(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        splits = [
            (placement, axis)
            for axis, placement in enumerate(tensor.placements)
            if not placement.is_replicate()
        ]
        splits.sort(key=lambda split: type(split[0]) is not Shard)
        for placement, axis in splits:
            dim: int = getattr(placement, "dim")  # noqa: B009 - a strided shard is no public type
            pieces = rows[dim].chunk(mesh.size(axis))
            mine = coordinate[axis]
            rows[dim] = pieces[mine] if mine < len(pieces) else rows[dim][:0]
    return tuple(
        slice(int(held[0]), int(held[-1]) + 1) if len(held) else slice(0, 0) for held in rows
    )


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
