"""Reading the index of a checkpoint, which torch pickles, without running what it may hold.

A pickle names the functions that build it, and any function of any module may be named. The index
of a checkpoint of ours needs a dozen, and holds tensors alone: what torch would unpickle as objects
later is refused, too.
"""

import pickle
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from cosmos_parallel.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = {
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),  # of Python 3.13
    "collections": ("OrderedDict",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    _METADATA: (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}


class _IndexUnpickler(pickle.Unpickler):
    """Builds what an index is made of, and nothing else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return what a pickle names.

        Raises:
            CheckpointError: if no index of ours needs it.
        """
        is_type = module_name == "torch" and isinstance(
            getattr(torch, global_name, None), torch.dtype
        )
        if is_type or global_name in _NAMES.get(module_name, ()):
            return super().find_class(module_name, global_name)
        raise CheckpointError(
            f"its index names {module_name}.{global_name}, which no checkpoint of ours needs and "
            "which is not run: it was changed, or another program wrote it"
        )


class CheckpointReader(FileSystemReader):
    """What torch.distributed.checkpoint reads with: tensors, by an index that cannot run anything.

    Args:
        directory: a path, or what the file system knows.
        files: the file system; a local one if it is not given.
    """

    def __init__(self, directory: str, files: FileSystemBase | None = None) -> None:
        super().__init__(directory)
        if files is not None:
            self.fs = files
            self.path = files.init_path(directory)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index; torch may ask for that of a rank, which checkpoints of ours have not.

        Raises:
            CheckpointError: as `read_index`.
        """
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            index = read_index(cast("BinaryIO", stream))
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


def read_index(stream: BinaryIO) -> Metadata:
    """Return the index of a checkpoint.

    Raises:
        CheckpointError: if it names anything to be run, holds something else than tensors, or
            places some outside of the checkpoint.
    """
    index: object = _IndexUnpickler(stream).load()
    if not isinstance(index, Metadata):
        raise CheckpointError(f"its index is {type(index).__name__}, not torch's Metadata")
    for name, value in index.state_dict_metadata.items():
        if not isinstance(cast("object", value), TensorStorageMetadata):
            raise CheckpointError(f"its index has {name} as {type(value).__name__}, not a tensor")
    # Any: what a storage keeps for itself has no type
    places: dict[Any, Any] = index.storage_data or {}
    for place in places.values():
        file = PurePosixPath(place.relative_path)
        if len(file.parts) != 1 or file.name in {"", ".."}:
            raise CheckpointError(f"its index places a tensor in {file}, outside of it")
    return index
