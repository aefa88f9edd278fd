"""Tensor and context parallelism for models of transformers, from what the models say themselves.

Tensor parallelism follows the model's own ``tp_plan``. Context parallelism exchanges the attention
function and hooks the model's entry and its output head; both leave every name as it was.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from cosmos_parallel.errors import MeshError
from cosmos_parallel.lora import layers_to_split
from cosmos_parallel.sequences import Visibility, gather_sequence, kept_columns, padded_rows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

CONTEXT_ATTENTION = "cosmos_context"


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


@dataclass(slots=True)
class _Call:
    """One forward pass under way.

    Attributes:
        length: columns that the caller gave.
        keep: columns of which the caller wants logits; 0 for all.
    """

    length: int
    keep: int | Tensor


class ContextHooks:
    """Gives each rank of a group its stretch of the sequences, and the head whole ones."""

    def __init__(self, model: "PreTrainedModel", group: dist.ProcessGroup) -> None:
        """Take over the entry and the output head of a model.

        Raises:
            MeshError: if the model has no output head of its own.
        """
        self._group = group
        self._call = _Call(0, 0)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Module):
            raise MeshError(f"cp: {type(model).__name__} has no output head to gather before")
        model.register_forward_pre_hook(self._divide, with_kwargs=True)
        # first: what tensor parallelism hooks there takes whole sequences
        head.register_forward_pre_hook(self._gather, prepend=True)

    def _divide(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args or kwargs.get("attention_mask") is not None:
            raise MeshError("cp: call the model with input_ids and position_ids only, by name")
        tokens, positions = kwargs["input_ids"], kwargs.get("position_ids")
        self._call = _Call(tokens.shape[1], kwargs.pop("logits_to_keep", 0))
        ranks, mine = self._group.size(), self._group.rank()
        tokens, positions = padded_rows(tokens, positions, ranks)
        return (), kwargs | {
            "input_ids": tokens.chunk(ranks, dim=1)[mine],
            "position_ids": positions.chunk(ranks, dim=1)[mine],
            "visibility": Visibility.of(positions, self._group),
        }

    def _gather(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = gather_sequence(args[0], self._group)
        return (kept_columns(hidden, self._call.length, self._call.keep),)


def register_context_attention() -> None:
    """Make the attention function known to transformers; may be called any number of times."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(CONTEXT_ATTENTION, _context_attention)
    AttentionMaskInterface.register(CONTEXT_ATTENTION, _no_mask)


def _no_mask(*args: object, **kwargs: object) -> None:
    """Stand in for the masks of transformers, which know the sequence of one rank only."""


def _context_attention(  # noqa: PLR0913 - the interface of transformers
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    visibility: Visibility,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from this rank's stretch ``[B, H, T / ranks, d]`` to whole sequences."""
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise MeshError(f"cp: this model's attention has {name}, which is not supported")
    assert visibility.group is not None
    keys, values = (
        gather_sequence(part.transpose(1, 2), visibility.group) for part in (key, value)
    )
    out = functional.scaled_dot_product_attention(
        query,
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=visibility.mask_of(keys, sliding_window),
        scale=scaling,
        enable_gqa=True,
    )
    return out.transpose(1, 2).contiguous(), None
