"""Safetensors on disk or in an object store: as a layout, as a place to publish to, as a source."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from cosmos_weightsync.files.checkpoints import Checkpoint, StoredTensor, read_checkpoint
from cosmos_weightsync.files.storage import Storage, open_storage

if _TYPE_CHECKING:
    from cosmos_weightsync.files.fetching import FileReceiver, FileReceiverConfig
    from cosmos_weightsync.files.mapping import checkpoint_shards
    from cosmos_weightsync.files.publishing import FileSender, FileSenderConfig

_LATER = {
    "FileReceiver": "fetching",
    "FileReceiverConfig": "fetching",
    "FileSender": "publishing",
    "FileSenderConfig": "publishing",
    "checkpoint_shards": "mapping",
}
"""Imported when first used, since they import torch."""

__all__ = [
    "Checkpoint",
    "FileReceiver",
    "FileReceiverConfig",
    "FileSender",
    "FileSenderConfig",
    "Storage",
    "StoredTensor",
    "checkpoint_shards",
    "open_storage",
    "read_checkpoint",
]


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(_import_module(f"cosmos_weightsync.files.{_LATER[name]}"), name)
    raise AttributeError(f"module 'cosmos_weightsync.files' has no attribute {name!r}")
