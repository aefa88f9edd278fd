"""A run of consecutive layers of torchtitan's decoder, between plain tensors."""

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.models.common.decoder import Decoder

from cosmos_parallel.sequences import Visibility, gather_sequence

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Stage(nn.Module):
    """The layers between the embedding and the last norm, or some of them.

    The first stage takes ``[B, T]`` tokens. Between stages goes ``[B, T / (cp tp), dim]``: each
    rank's own stretch of every sequence. The last stage returns ``[B, T, dim]`` whole on every
    rank, after the last norm. ``T`` is a multiple of ``cp x tp``.

    Attributes:
        decoder: torchtitan's, without the layers of other stages.
        head: the output head, in the last stage; not called here, but by whom the hidden states
            go to.
        value_head: likewise, where the model has one; in other stages what stands for it.
    """

    def __init__(
        self,
        decoder: Decoder,
        head: nn.Linear | None,
        value_head: nn.Module | None = None,
        *,
        cp_group: dist.ProcessGroup | None,
        tp_mesh: "DeviceMesh | None",
    ) -> None:
        """Take a decoder that has only what this stage has."""
        super().__init__()
        self.decoder = decoder
        self.head = head
        self.value_head = value_head
        self.is_first = decoder.tok_embeddings is not None
        self.is_last = decoder.norm is not None
        self._cp_group = cp_group
        self._tp_mesh = tp_mesh

    def forward(self, entering: Tensor, beside: Tensor) -> Tensor:
        """Run the layers.

        Args:
            entering: tokens, or what the stage before returned.
            beside: positions ``[B, T]``, whole.
        """
        positions = beside
        sight = Visibility.of(positions, self._cp_group)
        group = self._cp_group
        if group is not None:
            positions = positions.chunk(group.size(), dim=1)[group.rank()]
            if self.is_first:
                entering = entering.chunk(group.size(), dim=1)[group.rank()]
        if self._tp_mesh is not None and not self.is_first:
            entering = DTensor.from_local(entering, self._tp_mesh, [Shard(1)], run_check=False)
        hidden = self.decoder(entering, positions, sight)
        if not self.is_last:
            return hidden.to_local() if isinstance(hidden, DTensor) else hidden
        if isinstance(hidden, DTensor):
            hidden = hidden.redistribute(placements=[Replicate()]).to_local()
        return hidden if group is None else gather_sequence(hidden, group)


def keep_only(decoder: Decoder, layers: range, *, first: bool, last: bool) -> Decoder:
    """Drop from a decoder what is not in one stage, in place; names stay."""
    for name in list(decoder.layers):
        if int(name) not in layers:
            del decoder.layers[name]
    if not first:
        decoder.tok_embeddings = None  # pyright: ignore[reportAttributeAccessIssue]
    if not last:
        decoder.norm = None  # pyright: ignore[reportAttributeAccessIssue]
        decoder.lm_head = None  # pyright: ignore[reportAttributeAccessIssue]
    return decoder
