"""DTensors of which a rank holds several pieces, as torch.distributed.checkpoint can have them.

By itself it takes what a rank holds for one box, which begins where its first element is. Here the
pieces are given one by one, so that any layout finds them again.
"""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from cosmos_parallel.weight_files import held_pieces


def by_pieces(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict in which tensors held in several pieces are given by them.

    Memory is shared: what is read into the one is in the other.
    """
    return {name: _given_by_pieces(value) for name, value in state.items()}


def _given_by_pieces(value: Any) -> Any:
    pieces = held_pieces(value) if isinstance(value, DTensor) else []
    return Pieces.of(value, pieces) if len(pieces) > 1 else value


class Pieces(Tensor):
    """Pieces of a tensor, which has the whole one's shape and none of its memory.

    The three methods are those that torch.distributed.checkpoint asks of what it saves and reads.
    """

    pieces: dict[torch.Size, Tensor]  # by the offsets of their first elements

    @classmethod
    def of(cls, whole: Tensor, pieces: list[tuple[tuple[slice, ...], Tensor]]) -> Self:
        """Return pieces of a tensor, which share the memory of those given."""
        shape_only = torch.zeros((), dtype=whole.dtype).expand(whole.shape)
        found = shape_only.as_subclass(cls)
        found.pieces = {
            torch.Size([each.start for each in region]): piece for region, piece in pieces
        }
        return found

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Say what is written: each piece."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=piece.shape),
                    properties=TensorProperties.create_from_tensor(piece),
                    size=self.shape,
                ),
            )
            for offsets, piece in self.pieces.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Say what is read: each piece."""
        return [
            ChunkStorageMetadata(offsets=offsets, sizes=piece.shape)
            for offsets, piece in self.pieces.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the piece that was asked for."""
        assert index.offset is not None
        return self.pieces[index.offset]
