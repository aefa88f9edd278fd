"""A local checkpoint as shards: mapped into memory, read when a byte is first touched."""

import os

import torch
from torch import Tensor

from cosmos_weightsync.files.checkpoints import Checkpoint, StoredTensor, read_checkpoint
from cosmos_weightsync.shards import Shard, torch_dtype

__all__ = ["checkpoint_shards"]


def checkpoint_shards(where: str | os.PathLike[str]) -> tuple[Shard, ...]:
    """All tensors of a local safetensors directory or file, to be sent or compared.

    The files must stay as they are while the shards are in use; writing to the tensors changes
    memory and never the files.

    Raises:
        CorruptFileError: a file is damaged or truncated.
        LayoutError: there are no safetensors files.
    """
    checkpoint = read_checkpoint(where)
    files = {name: _mapped(checkpoint, name) for name in checkpoint.files}
    return tuple(
        Shard(stored.spec, _tensor(files[stored.file], stored))
        for stored in checkpoint.tensors.values()
    )


def _mapped(checkpoint: Checkpoint, file: str) -> Tensor:
    path = os.path.join(checkpoint.url, file)
    return torch.from_file(path, shared=False, size=checkpoint.files[file], dtype=torch.uint8)


def _tensor(file: Tensor, stored: StoredTensor) -> Tensor:
    dtype = torch_dtype(stored.spec.dtype)
    part = file[stored.offset : stored.offset + stored.spec.num_bytes]
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()  # A file that does not align its tensors.
    return part.view(dtype).view(stored.spec.global_shape)
