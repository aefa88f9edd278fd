"""Tensor parallelism for models of transformers, by the model's own ``tp_plan``; names stay."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from cosmos_parallel.errors import MeshError
from cosmos_parallel.lora import layers_to_split

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


def apply_tensor_plan(model: "PreTrainedModel", mesh: "DeviceMesh") -> None:
    """Split the matrices of a model as its ``tp_plan`` says, in place; every rank calls.

    Args:
        model: whole, the same on every rank.
        mesh: 1-D.
    """
    plan: Mapping[str, str] = model.tp_plan
    tied = model.config.get_text_config().tie_word_embeddings
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        style = plan.get(re.sub(r"\d+", "*", name))
        # embeddings stay whole, also where they are the head: FSDP2 shards them
        if style in (None, "embedding_rowwise") or (tied and module is head):
            continue
        for layer in layers_to_split(module, style):
            _split(layer, mesh, _style(style))


def _split(layer: nn.Module, mesh: "DeviceMesh", style: ParallelStyle) -> None:
    """Split a layer; what is frozen stays so, also where torch makes its parameters anew."""
    is_trained = {name: p.requires_grad for name, p in layer.named_parameters()}
    parallelize_module(layer, mesh, style)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(is_trained[name])


def _style(name: str) -> ParallelStyle:
    match name:
        case "colwise":
            return ColwiseParallel()
        case "colwise_gather_output":
            return ColwiseParallel(output_layouts=Replicate())
        case "rowwise":
            return RowwiseParallel()
        case "rowwise_split_input":
            return RowwiseParallel(input_layouts=Replicate())
        case "replicated_with_grad_allreduce":
            # a norm over the last dim; whichever other dim is said to be split, it is local, and
            # the gradient of its weight is summed
            return SequenceParallel(sequence_dim=1, use_local_output=True)
        case _:
            raise MeshError(f"tp: this model splits by {name}, which is not supported")
