"""What Muon needs beside torch's: the matrices of stacks of experts, each orthogonalised by itself.

torch's Muon takes matrices alone. It is given those of a stack one by one, as views of its weights,
gradients and momenta: the state of the stack is one tensor, laid out and saved like any other's.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from cosmos_parallel.errors import OptimizerError

_MOMENTUM = "momentum_buffer"


class ExpertMuon(torch.optim.Optimizer):
    """torch's Muon over the matrices of stacks ``[experts, rows, columns]``.

    A rank updates the experts that it holds. Ranks that hold parts of an expert's matrix work on it
    together, as on any matrix.

    Args:
        stacks: three-dimensional parameters.
        options: of ``torch.optim.Muon``.
    """

    def __init__(self, stacks: Iterable[nn.Parameter], **options: Any) -> None:
        super().__init__(stacks, dict(torch.optim.Muon([torch.zeros(1, 1)], **options).defaults))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every stack that has a gradient."""
        assert closure is None, "the learner has computed the gradients"
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name in self.defaults}
            for stack in group["params"]:
                if stack.grad is not None:
                    self._update(stack, options)

    def _update(self, stack: Tensor, options: dict[str, Any]) -> None:
        assert stack.grad is not None
        state = self.state[stack]
        if _MOMENTUM not in state:
            state[_MOMENTUM] = torch.zeros_like(stack.grad, memory_format=torch.preserve_format)
        held = list(_matrices(stack.detach()))
        if not held:
            return  # more ranks than experts
        muon = torch.optim.Muon(held, **options)
        parts = zip(held, _matrices(stack.grad), _matrices(state[_MOMENTUM]), strict=True)
        for matrix, gradient, momentum in parts:
            matrix.grad = gradient
            muon.state[matrix][_MOMENTUM] = momentum
        muon.step()


def _matrices(stack: Tensor) -> Iterator[Tensor]:
    """Yield a view of the matrix of each expert that this rank holds, or holds a part of."""
    if not isinstance(stack, DTensor):
        yield from stack.unbind()
        return
    shares = {axis: dim - 1 for axis, dim in _split_dims(stack) if dim}
    local = stack.to_local()
    if not shares:
        yield from local.unbind()
        return
    mesh = stack.device_mesh
    assert mesh.mesh_dim_names is not None, "meshes of models have names"
    of_matrix = mesh[tuple(mesh.mesh_dim_names[axis] for axis in shares)]
    for part in local.unbind():
        yield DTensor.from_local(
            part,
            of_matrix,
            [Shard(dim) for dim in shares.values()],
            run_check=False,
            shape=stack.shape[1:],
            stride=(stack.shape[2], 1),
        )


def check_shares(name: str, matrices: Tensor) -> None:
    """Refuse a matrix of which some ranks hold nothing: torch adds no update of Muon's to it.

    Of a stack they may hold no expert.

    Args:
        name: of the parameter, for errors.
        matrices: one, or a stack of them.

    Raises:
        OptimizerError: with the name.
    """
    if not isinstance(matrices, DTensor):
        return
    shares = [1] * matrices.ndim
    for axis, dim in _split_dims(matrices):
        shares[dim] *= matrices.device_mesh.size(axis)
    rows_and_columns = list(zip(matrices.shape, shares, strict=True))[-2:]
    if any(size < num for size, num in rows_and_columns):
        raise OptimizerError(
            f"muon: {name} is {tuple(matrices.shape)} and shared by {math.prod(shares)} ranks, "
            "which is too small to have a part on each; leave it to AdamW by a part of its name in "
            "adamw_names"
        )
    if matrices.ndim == 3 and any(
        dim and not isinstance(matrices.placements[axis], Shard)
        for axis, dim in _split_dims(matrices)
    ):
        raise OptimizerError(
            f"muon: {name}: {matrices.placements} split the matrix of an expert twice; leave it to "
            "AdamW by a part of its name in adamw_names"
        )


def _split_dims(tensor: DTensor) -> Iterator[tuple[int, int]]:
    """Yield the axes of a mesh that split a tensor, each with the dimension that it splits."""
    for axis, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            yield axis, dim
