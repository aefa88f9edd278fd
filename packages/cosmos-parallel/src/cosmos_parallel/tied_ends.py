"""One matrix that is a model's embedding and its output head, on the first and the last stage.

The first stage has it; the last has a copy, which belongs to no optimizer and no checkpoint:

    before passes   first ── weight ──► last
    after them      first ◄─ gradient ─ last, which is added to that of the embedding
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmos_parallel.gradients import laid_out_like, local_part
from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.pipeline import rank_of_last_stage
from cosmos_parallel.sharding import reshard


class TiedEnds:
    """What a rank has of the two, and how they are kept alike."""

    def __init__(
        self, embedding: nn.Module | None, head: nn.Module | None, mesh: TrainingMesh
    ) -> None:
        """Take both where this rank has them; they are sharded alike.

        Args:
            embedding: on the rank of the first stage.
            head: on the rank of the last.
            mesh: the ranks of the replica.
        """
        assert mesh.dims is not None
        self._embedding = embedding
        self._head = head
        self._group: dist.ProcessGroup = mesh.dims.get_mesh("pp").get_group()
        self._last = rank_of_last_stage(mesh)

    @torch.no_grad()
    def copy_weight(self) -> None:
        """Give the head the embedding's weight; every rank of the pipeline calls."""
        given, kept = _weight_of(self._embedding), _weight_of(self._head)
        self._move(
            None if given is None else local_part(given),
            None if kept is None else local_part(kept),
            source=0,
            target=self._last,
        )

    @torch.no_grad()
    def add_gradient(self) -> None:
        """Add the head's gradient to the embedding's; every rank of the pipeline calls."""
        weight, copy = _weight_of(self._embedding), _weight_of(self._head)
        if any(each is not None and not each.requires_grad for each in (weight, copy)):
            return  # on both ranks, or on none
        given = kept = None
        if copy is not None:
            given = _gradient_of(copy)
            copy.grad = None
        if weight is not None:
            kept = torch.empty_like(local_part(weight))
        self._move(given, kept, source=self._last, target=0)
        if weight is not None and kept is not None:
            kept.add_(_gradient_of(weight))
            weight.grad = laid_out_like(weight, kept)

    def _move(self, given: Tensor | None, kept: Tensor | None, *, source: int, target: int) -> None:
        """Write what one rank of the pipeline gives to where another keeps it."""
        if given is not None and kept is not None:
            kept.copy_(given)
        elif given is not None:
            dist.send(given.contiguous(), group=self._group, group_dst=target)
        elif kept is not None:
            dist.recv(kept, group=self._group, group_src=source)


def _weight_of(end: nn.Module | None) -> nn.Parameter | None:
    """Return what this rank holds, and not what FSDP2 has gathered."""
    if end is None:
        return None
    reshard(end)
    return end.get_parameter("weight")


def _gradient_of(weight: nn.Parameter) -> Tensor:
    """Return this rank's part; zeros where nothing came."""
    part = local_part(weight)
    return torch.zeros_like(part) if weight.grad is None else local_part(weight.grad)
