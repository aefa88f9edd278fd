"""Are the bytes those that were written, and do two checkpoints hold the same tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from cosmos_weightsync.errors import CorruptFileError, DigestError, LayoutError
from cosmos_weightsync.files.checkpoints import (
    INDEX_NAME,
    StoredTensor,
    read_checkpoint,
    read_weight_map,
    stored_tensors,
)
from cosmos_weightsync.files.manifests import (
    CHUNK_BYTES,
    Manifest,
    StoredBox,
    read_checked,
    read_manifest,
    stored_name,
)
from cosmos_weightsync.files.storage import Storage

__all__ = ["Difference", "compare_checkpoints", "verify_against_manifest"]

_BLOCK_BYTES = 8 * CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two checkpoints, or a directory and its manifest, differ."""

    name: str
    reason: str


def verify_against_manifest(
    storage: Storage, advance: Callable[[int], None]
) -> tuple[Manifest, list[Difference]]:
    """Read every tensor, header and index of a version directory and compare with its manifest.

    Args:
        storage: The directory of the version itself.
        advance: Told how many bytes have been looked at.

    Raises:
        StorageError: there is no manifest, or it is damaged, or a file is not there.
    """
    manifest = read_manifest(storage)
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    found = [
        difference for file in manifest.files for difference in _headers(storage, manifest, file)
    ]
    found += _index(storage, manifest)
    for box in manifest.boxes:
        spec = box.stored.spec
        try:
            _check(storage, box, buffer)
        except DigestError as error:
            found.append(Difference(f"{spec.name} {spec.box}", str(error)))
        advance(spec.num_bytes)
    return manifest, found


def _headers(storage: Storage, manifest: Manifest, file: str) -> Iterator[Difference]:
    """Where a file's header, which other readers go by, places its tensors elsewhere."""
    try:
        _, entries = stored_tensors(storage, file)
    except (CorruptFileError, LayoutError) as error:
        yield Difference(file, str(error))
        return
    placed = {(e.spec.name, e.offset, e.spec.dtype, e.spec.box.shape) for e in entries}
    for box in manifest.boxes:
        spec, offset = box.stored.spec, box.stored.offset
        place = (stored_name(spec), offset, spec.dtype, spec.box.shape)
        if box.stored.file == file and place not in placed:
            yield Difference(f"{spec.name} {spec.box}", f"the header of {file} does not place it")


def _index(storage: Storage, manifest: Manifest) -> Iterator[Difference]:
    """Where the index, by which other readers find whole tensors, places them elsewhere."""
    if any(box.stored.spec.box.shape != box.stored.spec.global_shape for box in manifest.boxes):
        return  # Nobody else reads parts, and no index is written of them.
    stored = {box.stored.spec.name: box.stored.file for box in manifest.boxes}
    try:
        placed = read_weight_map(storage)
    except CorruptFileError as error:
        yield Difference(INDEX_NAME, str(error))
        return
    if placed is None:
        if len(manifest.files) > 1:
            yield Difference(INDEX_NAME, "is not there")
        return
    for name in sorted({*stored, *placed}):
        here, there = stored.get(name, "no file"), placed.get(name, "no file")
        if here != there:
            yield Difference(name, f"is in {here}, and in {there} by {INDEX_NAME}")


def _check(storage: Storage, box: StoredBox, buffer: memoryview) -> None:
    num_bytes = box.stored.spec.num_bytes
    for low in range(0, num_bytes, _BLOCK_BYTES):
        read_checked(storage, "", box, low, buffer[: min(_BLOCK_BYTES, num_bytes - low)])


def compare_checkpoints(
    left: Storage, right: Storage, advance: Callable[[int], None]
) -> list[Difference]:
    """Which tensors of two safetensors directories are not the same, bit for bit."""
    one, other = read_checkpoint(left), read_checkpoint(right)
    found = [
        Difference(name, f"only in {one.url}") for name in one.tensors if name not in other.tensors
    ]
    found += [
        Difference(name, f"only in {other.url}")
        for name in other.tensors
        if name not in one.tensors
    ]
    for name, stored in one.tensors.items():
        twin = other.tensors.get(name)
        if twin is not None:
            found.extend(_compare((left, stored), (right, twin)))
        advance(stored.spec.num_bytes)
    return found


def _compare(
    left: tuple[Storage, StoredTensor], right: tuple[Storage, StoredTensor]
) -> Iterator[Difference]:
    one, other = left[1].spec, right[1].spec
    if (one.global_shape, one.dtype) != (other.global_shape, other.dtype):
        yield Difference(
            one.name,
            f"{one.dtype} {one.global_shape} and {other.dtype} {other.global_shape}",
        )
        return
    buffers = [np.empty(min(_BLOCK_BYTES, one.num_bytes), dtype=np.uint8) for _ in "ab"]
    for low in range(0, one.num_bytes, _BLOCK_BYTES):
        count = min(_BLOCK_BYTES, one.num_bytes - low)
        for (storage, stored), buffer in zip((left, right), buffers, strict=True):
            storage.read_into(stored.file, stored.offset + low, buffer[:count].data)
        differing = np.flatnonzero(buffers[0][:count] != buffers[1][:count])
        if len(differing):
            yield Difference(one.name, f"differs from byte {low + int(differing[0])} on")
            return
