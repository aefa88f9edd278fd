"""A directory of safetensors files as it is: which tensor lies where. Only headers are read."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.errors import CorruptFileError, LayoutError
from cosmos_weightsync.files.headers import decode_header, header_bytes
from cosmos_weightsync.files.storage import Storage, open_storage
from cosmos_weightsync.layout import Layout, ShardSpec

__all__ = [
    "INDEX_NAME",
    "Checkpoint",
    "StoredTensor",
    "read_checkpoint",
    "read_weight_map",
    "read_whole",
    "stored_tensors",
]

INDEX_NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor, or a part of one, in a file; ``offset`` counts from the file's first byte."""

    spec: ShardSpec
    file: str
    offset: int


@dataclass(frozen=True, eq=False, slots=True)
class Checkpoint:
    """All tensors of a directory.

    Attributes:
        url: Where it lies.
        files: Every safetensors file and its size in bytes.
        tensors: By name, in the order of the files.
    """

    url: str
    files: Mapping[str, int]
    tensors: Mapping[str, StoredTensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(item.spec.num_bytes for item in self.tensors.values())

    def layout(self) -> Layout:
        """As a side of one rank that holds everything."""
        return Layout.from_ranks([[item.spec for item in self.tensors.values()]])


def read_checkpoint(
    where: str | os.PathLike[str] | Storage, options: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Look at a safetensors directory, or at one file; reads headers, never a tensor.

    Where there is an index (``model.safetensors.index.json``), it says which files belong; where
    there is none, all safetensors files of the directory do.

    Args:
        where: A local directory or file, or a URL such as ``s3://bucket/model``.
        options: For the file system behind a URL.

    Raises:
        CorruptFileError: a file is damaged or truncated, or the index names what is not there.
        LayoutError: there are no safetensors files, or two hold the same tensor.
    """
    if not isinstance(where, str | os.PathLike):
        return _read(where, None)
    text = os.fspath(where).rstrip("/")
    if text.endswith(SUFFIX):
        directory, _, name = text.rpartition("/")
        return _read(open_storage(directory or ".", options), name)
    return _read(open_storage(text, options), None)


def _read(storage: Storage, only: str | None) -> Checkpoint:
    weight_map = None if only else read_weight_map(storage)
    names = [only] if only else _file_names(storage, weight_map)
    files: dict[str, int] = {}
    tensors: dict[str, StoredTensor] = {}
    for file in names:
        files[file], found = stored_tensors(storage, file)
        for item in found:
            name = item.spec.name
            if weight_map is not None and weight_map.get(name, file) != file:
                continue  # A leftover of another file; the index decides.
            if name in tensors:
                raise LayoutError(
                    f"{storage.url}: {name} is in {tensors[name].file} and in {file}; an "
                    f"{INDEX_NAME} would say which counts"
                )
            tensors[name] = item
    missing = sorted(set(weight_map or ()) - set(tensors))
    if missing:
        raise CorruptFileError(
            f"{storage.url}: the index places {missing[0]} in {(weight_map or {})[missing[0]]}, "
            f"which does not hold it ({len(missing)} such tensors)"
        )
    return Checkpoint(storage.url, files, tensors)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_weight_map(storage: Storage) -> dict[str, str] | None:
    """The file of each tensor by the index of a directory; ``None`` where there is no index.

    Raises:
        CorruptFileError: it is damaged.
    """
    if storage.size(INDEX_NAME) is None:
        return None
    try:
        return msgspec.json.decode(read_whole(storage, INDEX_NAME), type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFileError(f"{storage.url}/{INDEX_NAME}: not an index: {error!r}") from error


def _file_names(storage: Storage, weight_map: Mapping[str, str] | None) -> list[str]:
    present = [name for name in storage.names() if name.endswith(SUFFIX)]
    named = sorted(set((weight_map or {}).values()))
    lacking = sorted(set(named) - set(present))
    if lacking:
        raise CorruptFileError(f"{storage.url}: the index names {lacking[0]}, which is not there")
    if not present:
        raise LayoutError(f"{storage.url}: no {SUFFIX} file; is this a checkpoint directory?")
    return named or present


def stored_tensors(storage: Storage, file: str) -> tuple[int, list[StoredTensor]]:
    """A file's size, and what its header says that it holds.

    Raises:
        CorruptFileError: it is damaged or truncated.
        LayoutError: there is no such file.
    """
    full_name = f"{storage.url}/{file}"
    size = storage.size(file)
    if size is None:
        raise LayoutError(f"{full_name}: there is no such file")
    first = bytearray(min(8, size))
    storage.read_into(file, 0, memoryview(first))
    length = header_bytes(bytes(first), full_name)
    if size < 8 + length:
        raise CorruptFileError(f"{full_name}: ends within its header: it was truncated")
    text = bytearray(length)
    storage.read_into(file, 8, memoryview(text))
    entries, _ = decode_header(bytes(text), full_name)
    end = 8 + length
    for entry in entries:
        end += entry.num_bytes
        if end > size:
            raise CorruptFileError(
                f"{full_name}: ends at byte {size}, {entry.name} at {end}: it was truncated"
            )
    if end < size:
        raise CorruptFileError(f"{full_name}: no tensor has the bytes from {end} on, to {size}")
    return size, [
        StoredTensor(
            ShardSpec(entry.name, entry.shape, Box.full(entry.shape), entry.dtype),
            file,
            8 + length + entry.offset,
        )
        for entry in entries
    ]


def read_whole(storage: Storage, path: str) -> bytes:
    """A small file.

    Raises:
        CorruptFileError: there is none.
    """
    size = storage.size(path)
    if size is None:
        raise CorruptFileError(f"{storage.url}/{path}: there is no such file")
    content = bytearray(size)
    storage.read_into(path, 0, memoryview(content))
    return bytes(content)
