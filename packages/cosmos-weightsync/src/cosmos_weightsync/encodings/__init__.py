"""Less than everything: casts, quantised weights, selections of tensors, changes only."""

from cosmos_weightsync.encodings.amax import AmaxGroup
from cosmos_weightsync.encodings.cast import Cast
from cosmos_weightsync.encodings.contract import Encoding
from cosmos_weightsync.encodings.encoded import EncodedShards, encode
from cosmos_weightsync.encodings.merged import merged_shards
from cosmos_weightsync.encodings.quantised import BlockFp8, MxFp8, NvFp4, RowwiseFp8
from cosmos_weightsync.encodings.selection import (
    adapter_files,
    adapter_shards,
    trainable,
)

__all__ = [
    "AmaxGroup",
    "BlockFp8",
    "Cast",
    "EncodedShards",
    "Encoding",
    "MxFp8",
    "NvFp4",
    "RowwiseFp8",
    "adapter_files",
    "adapter_shards",
    "encode",
    "merged_shards",
    "trainable",
]
