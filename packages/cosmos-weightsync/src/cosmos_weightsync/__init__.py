"""Move the weights of a model between any two sharded layouts.

A shard is a box in the coordinates of the full tensor. Senders and receivers describe their boxes,
both plan which slice goes where, and only slices move.
"""

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    DigestError,
    LayoutError,
    PeerLostError,
    PlanError,
    ProtocolError,
    TransferError,
    TransportUnavailableError,
    UncoveredRegionError,
    UnknownTensorError,
    VersionError,
    WeightSyncError,
)
from cosmos_weightsync.layout import Layout, ShardSpec
from cosmos_weightsync.planning import Piece, PlanStats, TransferPlan, plan_transfer
from cosmos_weightsync.receiver import ReceiverConfig, StagedVersion, WeightReceiver
from cosmos_weightsync.sender import SenderConfig, WeightSender
from cosmos_weightsync.shards import Shard, shards_of

__all__ = [
    "Box",
    "ConfigurationError",
    "DeadlineError",
    "DigestError",
    "Layout",
    "LayoutError",
    "PeerLostError",
    "Piece",
    "PlanError",
    "PlanStats",
    "ProtocolError",
    "ReceiverConfig",
    "SenderConfig",
    "Shard",
    "ShardSpec",
    "StagedVersion",
    "TransferError",
    "TransferPlan",
    "TransportUnavailableError",
    "UncoveredRegionError",
    "UnknownTensorError",
    "VersionError",
    "WeightReceiver",
    "WeightSender",
    "WeightSyncError",
    "plan_transfer",
    "shards_of",
]
