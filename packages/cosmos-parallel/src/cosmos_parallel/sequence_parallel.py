"""Sequence parallelism beside ``tp`` in models of transformers (Korthikanti et al., 2205.05198).

Around the parts of a layer whose matrices the ranks split, each rank has a stretch of every row:
what is normed, added up and kept for the backward pass is its share alone.

    stretch ─► norm ─► whole ─ attention, heads of this rank ─ stretch ─► + ─► norm ─► whole ─ ...

Names stay as they were. Matrices take and give whole rows, as without.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from cosmos_parallel.cutting import layers_alone
from cosmos_parallel.errors import MeshError
from cosmos_parallel.sequences import joined
from cosmos_parallel.split_layers import norm_of_parts, split_layer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig, PreTrainedModel


def check_rows(config: "PretrainedConfig") -> None:
    """Refuse a model of which more than layers and a norm see hidden states.

    Raises:
        MeshError: names its type.
    """
    if not layers_alone(config):
        raise MeshError(
            f"sequence_parallel: in {config.model_type} more than layers and a norm see hidden "
            "states, or it does not say so; leave it out"
        )


def divide_rows(model: "PreTrainedModel", mesh: "DeviceMesh") -> None:
    """Have each rank of a mesh keep a stretch of rows between the parts of a decoder's layers.

    Args:
        model: whole, its matrices split over the mesh; not sharded by FSDP2 yet.
        mesh: 1-D.

    Raises:
        MeshError: if a layer has parameters of its own.
    """
    decoder: nn.Module = model.get_decoder()
    stack = next(part for part in decoder.children() if isinstance(part, nn.ModuleList))
    for part in decoder.children():
        if part is not stack and not isinstance(part, nn.Embedding):
            _divide_norm(part, mesh)
    for layer in stack:
        if next(layer.parameters(recurse=False), None) is not None:
            name = model.config.model_type
            raise MeshError(f"sequence_parallel: layers of {name} have parameters of their own")
        for part in layer.children():
            if not _has_matrices(part):
                _divide_norm(part, mesh)
    _RowHooks(mesh.get_group()).hook(decoder, stack)


def _has_matrices(part: nn.Module) -> bool:
    return any(weight.ndim > 1 for weight in part.parameters())


def _divide_norm(part: nn.Module, mesh: "DeviceMesh") -> None:
    """Have a norm's gradient be summed over what ranks have of rows."""
    if next(part.parameters(), None) is not None:
        split_layer(part, mesh, norm_of_parts())


class _RowHooks:
    """Divides rows where layers begin, and gathers them for attention and the like."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._length = 0  # columns of the rows of the layer under way

    def hook(self, decoder: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Put hooks on a decoder, its layers and their parts."""
        for layer in layers:
            layer.register_forward_pre_hook(self._enter, with_kwargs=True)
            for part in layer.children():
                if _has_matrices(part):
                    part.register_forward_pre_hook(self._gather, with_kwargs=True)
                    part.register_forward_hook(self._divide)
        decoder.register_forward_hook(self._leave)

    @property
    def _share(self) -> int:
        """Columns of a rank's stretch; of rows of one column, more than they have."""
        return max(-(-self._length // self._group.size()), 2 if self._length == 1 else 1)

    def _enter(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Divide what goes into a first layer; others are given stretches."""
        self._length = _num_columns(kwargs)
        hidden, *others = args
        if hidden.shape[1] == self._length:
            hidden = self._stretch(hidden)
        return (hidden, *others), kwargs

    def _gather(
        self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._whole(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._whole(kwargs["hidden_states"])}

    def _divide(self, part: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            first, *others = output
            return (self._stretch(first), *others)
        return self._stretch(output)

    def _leave(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        output.last_hidden_state = self._whole(output.last_hidden_state)
        return output

    def _stretch(self, whole: Tensor) -> Tensor:
        return _TakeStretch.apply(whole, self._share, self._group)  # pyright: ignore[reportReturnType]

    def _whole(self, stretch: Tensor) -> Tensor:
        return _GatherRows.apply(stretch, self._length, self._group)  # pyright: ignore[reportReturnType]


def _num_columns(kwargs: dict[str, Any]) -> int:
    """Return how many columns the rows have that a layer is called about."""
    positions = kwargs.get("position_ids")
    if isinstance(positions, Tensor):
        return positions.shape[-1]
    turned = kwargs.get("position_embeddings")
    if not isinstance(turned, tuple):
        raise MeshError("sequence_parallel: this model does not tell its layers of positions")
    return turned[0].shape[-2]


class _TakeStretch(torch.autograd.Function):
    """This rank's stretch of rows that all have; gradients are put together again."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, share: int, group: dist.ProcessGroup) -> Tensor:
        ctx.length, ctx.group = whole.shape[1], group
        return _own(whole, share, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _all(grad_outputs[0], ctx.length, ctx.group), None, None


class _GatherRows(torch.autograd.Function):
    """Rows from every rank's stretch; of a gradient that all have, each keeps its own part."""

    @staticmethod
    def forward(ctx: Any, stretch: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
        ctx.share, ctx.group = stretch.shape[1], group
        return _all(stretch, length, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _own(grad_outputs[0], ctx.share, ctx.group), None, None


def _own(whole: Tensor, share: int, group: dist.ProcessGroup) -> Tensor:
    """Return columns ``[B, share, D]`` of this rank, padded with zeros behind the last."""
    missing = share * group.size() - whole.shape[1]
    padded = functional.pad(whole, (0, 0, 0, missing))
    return padded.narrow(1, share * group.rank(), share).contiguous()


def _all(stretch: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """Return ``[B, length, D]`` of all ranks' ``[B, share, D]``."""
    whole = joined(stretch, group)
    # no view: a pipeline lets go of what a stage has returned in place
    return whole if whole.shape[1] == length else whole[:, :length].clone()
