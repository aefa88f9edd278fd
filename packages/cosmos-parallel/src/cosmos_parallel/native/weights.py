"""Fill a model from safetensors, every rank with its own parts only."""

from pathlib import Path

import torch

from cosmos_parallel.native.model import NativeCausalLM
from cosmos_parallel.weight_files import WeightFiles, held_part, held_region, mismatch_error


def fill(model: NativeCausalLM, path: Path) -> None:
    """Read every parameter and persistent buffer of this rank.

    Raises:
        ModelMismatchError: naming tensors that are missing or of another shape.
    """
    problems: list[str] = []
    with WeightFiles(path) as files, torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            stored = model.to_hf({name: torch.empty(tensor.shape, device="meta")})
            region, local = held_region(tensor), held_part(tensor)
            assert local.shape == tuple(part.stop - part.start for part in region), name
            if model.hf_names.is_transposed(name.removeprefix("decoder.")):
                region = (*region[:-2], region[-1], region[-2])
                local = local.transpose(-2, -1)
            problems += files.read(stored, region, local)
    if problems:
        raise mismatch_error(path, problems)
