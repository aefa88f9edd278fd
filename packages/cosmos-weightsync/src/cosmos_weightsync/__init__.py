"""Move the weights of a model between any two sharded layouts.

A shard is a box in the coordinates of the full tensor. Senders and receivers describe their boxes,
both plan which slice goes where, and only slices move.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.errors import (
    BaseVersionError,
    ConfigurationError,
    CorruptFileError,
    DeadlineError,
    DigestError,
    EncodingError,
    FencedError,
    LayoutError,
    PeerLostError,
    PlanError,
    PlanTooLargeError,
    ProtocolError,
    QuorumError,
    StorageError,
    StorageFullError,
    TopologyError,
    TransferError,
    TransportUnavailableError,
    UncoveredRegionError,
    UnknownTensorError,
    VersionError,
    VersionGoneError,
    WeightSyncError,
)
from cosmos_weightsync.layout import Layout, ShardSpec
from cosmos_weightsync.planning import Piece, PlanStats, TransferPlan, plan_transfer
from cosmos_weightsync.replanning import plan_join, replan_without
from cosmos_weightsync.simulation import Failure, Simulation, Span, simulate
from cosmos_weightsync.topology import Link, Links, Place, Topology

if _TYPE_CHECKING:
    from cosmos_weightsync.ballots import Quorum
    from cosmos_weightsync.conversion import converted_shards
    from cosmos_weightsync.directory import WeightDirectory
    from cosmos_weightsync.files import (
        Checkpoint,
        FileReceiver,
        FileReceiverConfig,
        FileSender,
        FileSenderConfig,
        checkpoint_shards,
        read_checkpoint,
    )
    from cosmos_weightsync.placing import block_scale_box, placed_shard
    from cosmos_weightsync.receiver import ReceiverConfig, StagedVersion, WeightReceiver
    from cosmos_weightsync.sender import Publication, SenderConfig, WeightSender
    from cosmos_weightsync.shards import Shard, shards_of

_LATER = {
    "Checkpoint": "files",
    "FileReceiver": "files",
    "FileReceiverConfig": "files",
    "FileSender": "files",
    "FileSenderConfig": "files",
    "Publication": "sender",
    "Quorum": "ballots",
    "ReceiverConfig": "receiver",
    "SenderConfig": "sender",
    "Shard": "shards",
    "StagedVersion": "receiver",
    "WeightDirectory": "directory",
    "WeightReceiver": "receiver",
    "WeightSender": "sender",
    "block_scale_box": "placing",
    "checkpoint_shards": "files",
    "converted_shards": "conversion",
    "placed_shard": "placing",
    "read_checkpoint": "files",
    "shards_of": "shards",
}
"""Imported when first used, since they import torch: layouts and plans are read without it."""

__all__ = [
    "BaseVersionError",
    "Box",
    "Checkpoint",
    "ConfigurationError",
    "CorruptFileError",
    "DeadlineError",
    "DigestError",
    "EncodingError",
    "Failure",
    "FencedError",
    "FileReceiver",
    "FileReceiverConfig",
    "FileSender",
    "FileSenderConfig",
    "Layout",
    "LayoutError",
    "Link",
    "Links",
    "PeerLostError",
    "Piece",
    "Place",
    "PlanError",
    "PlanStats",
    "PlanTooLargeError",
    "ProtocolError",
    "Publication",
    "Quorum",
    "QuorumError",
    "ReceiverConfig",
    "SenderConfig",
    "Shard",
    "ShardSpec",
    "Simulation",
    "Span",
    "StagedVersion",
    "StorageError",
    "StorageFullError",
    "Topology",
    "TopologyError",
    "TransferError",
    "TransferPlan",
    "TransportUnavailableError",
    "UncoveredRegionError",
    "UnknownTensorError",
    "VersionError",
    "VersionGoneError",
    "WeightDirectory",
    "WeightReceiver",
    "WeightSender",
    "WeightSyncError",
    "block_scale_box",
    "checkpoint_shards",
    "converted_shards",
    "placed_shard",
    "plan_join",
    "plan_transfer",
    "read_checkpoint",
    "replan_without",
    "shards_of",
    "simulate",
]


def __getattr__(name: str) -> object:
    if name in _LATER:
        module = _import_module(f"cosmos_weightsync.{_LATER[name]}")
        return getattr(module, name)
    raise AttributeError(f"module 'cosmos_weightsync' has no attribute {name!r}")
