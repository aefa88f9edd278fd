"""How a layer is split over ranks, whatever decides which and by what style."""

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel, parallelize_module

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split_layer(layer: nn.Module, mesh: "DeviceMesh", style: ParallelStyle) -> None:
    """Split a layer; what is frozen stays so, also where torch makes its parameters anew."""
    is_trained = {name: p.requires_grad for name, p in layer.named_parameters()}
    parallelize_module(layer, mesh, style)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(is_trained[name])


def norm_of_parts() -> ParallelStyle:
    """Return the style of a norm over the last dim, of which each rank is given a part.

    Whichever other dim is said to be split, it is local, and the gradient of its weight is summed.
    """
    return SequenceParallel(sequence_dim=1, use_local_output=True)
