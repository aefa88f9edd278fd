"""Decoder layers compiled by torch, for rows of whatever length come."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from cosmos_parallel.mesh import ParallelConfig


def compile_layers(
    layers: Iterable[nn.Module], backend: str | Callable[..., Any], parallel: ParallelConfig
) -> None:
    """Have torch compile each layer at its first pass, in place: names stay as they are.

    A layer is compiled for one length and, when a second comes, for all. Under ``tp`` it is
    compiled for each length, as torch does not get through DTensors whose lengths are symbols;
    after ``torch._dynamo.config.recompile_limit`` of them, others run as they are.

    Args:
        layers: of one model.
        backend: as of ``torch.compile``.
        parallel: the layout of the model.
    """
    dynamic = False if parallel.tp > 1 else None
    for layer in layers:
        layer.compile(backend=backend, dynamic=dynamic)
