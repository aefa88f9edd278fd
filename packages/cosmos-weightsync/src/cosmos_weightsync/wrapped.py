"""What trainers wrap around modules and tensors: seen through, or refused by name.

A tensor can be described where its elements are the model's own and lie where it says. That is not
so of the flat parameters of FSDP1, of DeepSpeed's partitions, and of tensors made of others.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FlatParameter,
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cosmos_weightsync.errors import LayoutError

__all__ = ["check_kind", "check_sharding", "resharded", "seen_through"]

_INNER = "module"
_TRANSPARENT = (DataParallel, DistributedDataParallel, AveragedModel)
"""Modules that hold another one as `_INNER`, and no parameters of their own."""


def seen_through(module: nn.Module) -> Callable[[str], str]:
    """What makes of a parameter's path in a module the path that it has without wrappers."""
    wrappers = {
        path
        for path, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, _TRANSPARENT)
    }

    def name(path: str) -> str:
        parts = path.split(".")
        return ".".join(
            part
            for index, part in enumerate(parts)
            if part != _INNER or ".".join(parts[:index]) not in wrappers
        )

    return name


def resharded(module: nn.Module) -> nn.Module:
    """The module, with the parameters in place that FSDP2 keeps.

    After a forward pass without a backward one, such as an evaluation, those of the root are whole
    ones that were gathered, whose memory the next backward pass frees. They are given back here, as
    ``state_dict`` does; no rank waits for another.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return module


def check_sharding(module: nn.Module) -> None:
    """Refuse a module that FSDP1 has sharded: its parameters are parts of a flat one.

    Raises:
        LayoutError: it is one.
    """
    for path, part in module.named_modules():
        if isinstance(part, FullyShardedDataParallel):
            strategy: Any = part.sharding_strategy
            if strategy is not ShardingStrategy.NO_SHARD:
                raise LayoutError(f"{path or type(part).__name__}: {_FSDP1}")


def check_kind(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose elements do not lie where it says.

    Raises:
        LayoutError: naming it, and what to hand over instead.
    """
    if is_lazy(tensor):
        raise LayoutError(f"{name}: has no shape yet: a lazy module gets it by a first batch")
    if isinstance(tensor, FlatParameter):
        raise LayoutError(f"{name}: {_FSDP1}")
    if hasattr(tensor, "ds_tensor"):
        raise LayoutError(
            f"{name}: DeepSpeed has partitioned it, and nothing of it is here: hand over pairs of "
            "name and gathered tensor"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise LayoutError(f"{name}: its elements do not lie in rows, it is {kind}: send its parts")
    _check_numbers(name, tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def _check_numbers(name: str, tensor: Tensor) -> None:
    """Refuse what is made of other tensors, unless one of these is the same with its numbers."""
    if not is_traceable_wrapper_subclass(tensor):
        return
    inner, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, attribute) for attribute in inner]
    if not any((part.shape, part.dtype) == (tensor.shape, tensor.dtype) for part in parts):
        raise LayoutError(
            f"{name}: a {type(tensor).__name__} is made of others ({', '.join(inner)}): hand these "
            "over under names of their own, or the model before it is quantised"
        )


_FSDP1 = (
    "FullyShardedDataParallel (FSDP1) keeps no tensors that could be described, only parts of flat "
    "ones: shard the model by 'fully_shard' (FSDP2)"
)
