"""Safetensors on disk or in an object store: as a layout, as a place to publish to, as a source."""

from cosmos_weightsync.files.checkpoints import Checkpoint, StoredTensor, read_checkpoint
from cosmos_weightsync.files.fetching import FileReceiver, FileReceiverConfig
from cosmos_weightsync.files.publishing import FileSender, FileSenderConfig
from cosmos_weightsync.files.storage import Storage, open_storage

__all__ = [
    "Checkpoint",
    "FileReceiver",
    "FileReceiverConfig",
    "FileSender",
    "FileSenderConfig",
    "Storage",
    "StoredTensor",
    "open_storage",
    "read_checkpoint",
]
