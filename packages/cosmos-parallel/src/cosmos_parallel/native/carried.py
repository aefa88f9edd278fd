"""Weights of a checkpoint that are not computed with: kept as they are, exported and published."""

from pathlib import Path

import torch
from torch import nn

from cosmos_parallel.native.model import NativeCausalLM
from cosmos_parallel.native.names import CARRIED
from cosmos_parallel.weight_files import WeightFiles


def carry(model: NativeCausalLM, path: Path, dtype: torch.dtype) -> None:
    """Give the ranks of the first stage a place for such weights, as buffers on the meta device.

    Every one of these ranks has them whole: they are what sees, a small part of a model.

    Args:
        model: whose ``hf_names`` say which weights these are.
        path: the directory that has them.
        dtype: how they are held.

    Raises:
        ModelMismatchError: if a file cannot be read.
    """
    if not model.hf_names.carried or not model.stages[0].is_first:
        return
    root = nn.Module()
    with WeightFiles(path) as files:
        for name in files.names:
            if not name.startswith(model.hf_names.carried):
                continue
            *parents, last = name.split(".")
            part = root
            for parent in parents:
                if not hasattr(part, parent):
                    part.add_module(parent, nn.Module())
                part = part.get_submodule(parent)
            empty = torch.empty(files.shape(name), dtype=dtype, device="meta")
            part.register_buffer(last, empty)
    model.add_module(CARRIED, root)
