"""Tensors into safetensors files, a slab at a time, with a checksum of every chunk."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from cosmos_weightsync.byte_rows import flat_bytes, lent_bytes
from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.errors import StorageError
from cosmos_weightsync.files.checkpoints import StoredTensor
from cosmos_weightsync.files.headers import encode_header
from cosmos_weightsync.files.manifests import CHUNK_BYTES, StoredBox, stored_name
from cosmos_weightsync.files.storage import Storage
from cosmos_weightsync.layout import ShardSpec
from cosmos_weightsync.shards import torch_dtype

__all__ = ["ChunkSums", "write_file"]

SLAB_BYTES = 16 << 20


class ChunkSums:
    """The xxh3_64 of each chunk of a stream that arrives in parts of any size."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()
        self._filled = 0
        self._sums: list[int] = []

    def add(self, part: memoryview) -> None:
        """Carry on."""
        while len(part):
            taken = part[: CHUNK_BYTES - self._filled]
            self._state.update(taken)
            self._filled += len(taken)
            part = part[len(taken) :]
            if self._filled == CHUNK_BYTES:
                self._finish()

    def result(self) -> tuple[int, ...]:
        """All sums; the last chunk may be short."""
        if self._filled:
            self._finish()
        return tuple(self._sums)

    def _finish(self) -> None:
        self._sums.append(self._state.intdigest())
        self._state.reset()
        self._filled = 0


@dataclass(slots=True)
class _Progress:
    """What is being written just now, and what has been."""

    current: str = "the header"
    boxes: list[StoredBox] = field(default_factory=list[StoredBox])


def write_file(
    storage: Storage,
    path: str,
    specs: Sequence[ShardSpec],
    held: HeldBoxes,
    metadata: Mapping[str, str],
) -> tuple[int, list[StoredBox]]:
    """Write one safetensors file, casting to the dtypes of the specs.

    Args:
        storage: Where to.
        path: The file.
        specs: What it shall hold, in this order.
        held: Where the tensors are.
        metadata: For its header.

    Returns:
        Its size, and what lies where in it.

    Raises:
        StorageFullError: there is no room; names the tensor it stopped at.
        StorageError: it cannot be written.
    """
    table = [(stored_name(spec), spec.dtype, spec.box.shape) for spec in specs]
    header, entries = encode_header(table, metadata)
    progress = _Progress()
    file = path.rpartition("/")[2]
    slots = [
        StoredTensor(spec, file, len(header) + entry.offset)
        for spec, entry in zip(specs, entries, strict=True)
    ]
    try:
        storage.write(path, _parts(header, slots, held, progress))
    except StorageError as error:
        raise type(error)(f"{error}; stopped at {progress.current}") from error
    size = len(header) + sum(spec.num_bytes for spec in specs)
    return size, progress.boxes


def _parts(
    header: bytes, slots: Sequence[StoredTensor], held: HeldBoxes, progress: _Progress
) -> Iterator[memoryview | bytes]:
    yield header
    for slot in slots:
        progress.current = f"{slot.spec.name} {slot.spec.box}"
        sums = ChunkSums()
        for part in _slabs(slot.spec, held):
            sums.add(part)
            yield part
        progress.boxes.append(StoredBox(slot, sums.result()))


def _slabs(spec: ShardSpec, held: HeldBoxes) -> Iterator[memoryview]:
    if spec.box.is_empty:
        return
    item_bytes = spec.num_bytes // spec.box.numel
    dtype = torch_dtype(spec.dtype)
    for box in spec.box.split(max(1, SLAB_BYTES // item_bytes)):
        view = _on_the_host(held.view(spec.name, box), dtype)
        yield lent_bytes(flat_bytes(view)).data


def _on_the_host(view: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        return view.to(dtype).cpu().contiguous()
