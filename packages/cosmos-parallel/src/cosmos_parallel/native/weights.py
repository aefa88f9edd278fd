"""Fill a model from safetensors, every rank with its own parts only."""

from pathlib import Path

import torch
from torch import Tensor

from cosmos_parallel.native.model import NativeCausalLM
from cosmos_parallel.weight_files import (
    Region,
    WeightFiles,
    held_part,
    held_region,
    mismatch_error,
)

_OURS = "decoder."


def fill(model: NativeCausalLM, path: Path) -> None:
    """Read every parameter and persistent buffer of this rank.

    Raises:
        ModelMismatchError: naming tensors that are missing or of another shape.
    """
    problems: list[str] = []
    held = model.state_dict(keep_vars=True)
    empty = {name: torch.empty(tensor.shape, device="meta") for name, tensor in held.items()}
    with WeightFiles(path) as files, torch.no_grad():
        for name, tensor in held.items():
            region, local = held_region(tensor), held_part(tensor)
            assert local.shape == tuple(part.stop - part.start for part in region), name
            names, region = _in_files(model, name, region, empty)
            stored = model.to_hf({each: empty[each] for each in names})
            if model.hf_names.is_transposed(name.removeprefix(_OURS)):
                region = (*region[:-2], region[-1], region[-2])
                local = local.transpose(-2, -1)
            problems += files.read(stored, region, local)
    if problems:
        raise mismatch_error(path, list(dict.fromkeys(problems)))


def _in_files(
    model: NativeCausalLM, name: str, region: Region, shapes: dict[str, Tensor]
) -> tuple[list[str], Region]:
    """Return what is one tensor in files with a tensor, itself too, and where its part is there."""
    if not name.startswith(_OURS):
        return [name], region
    joined = model.hf_names.joined_with(name.removeprefix(_OURS))
    names = [f"{_OURS}{part}" for part in joined.parts]
    before = sum(shapes[part].shape[joined.dim] for part in names[: names.index(name)])
    if not before:
        return names, region
    moved = region[joined.dim]
    moved = slice(moved.start + before, moved.stop + before)
    return names, (*region[: joined.dim], moved, *region[joined.dim + 1 :])
