"""Typed config, trajectories, metrics, run directory, controller and bus. Never imports torch."""

from cosmos_core.activity import ActivityMeter, shares_of
from cosmos_core.errors import CosmosError
from cosmos_core.metrics import FanOut, MetricRecord, MetricSink, read_metrics
from cosmos_core.rundir import RunDirectory, RunDirectoryError, latest_run, write_atomic
from cosmos_core.trajectory import (
    UNSAMPLED,
    FinishReason,
    Trajectory,
    TrajectoryFormatError,
    VersionSpan,
    decode_trajectory,
    encode_trajectory,
)

__all__ = [
    "UNSAMPLED",
    "ActivityMeter",
    "CosmosError",
    "FanOut",
    "FinishReason",
    "MetricRecord",
    "MetricSink",
    "RunDirectory",
    "RunDirectoryError",
    "Trajectory",
    "TrajectoryFormatError",
    "VersionSpan",
    "decode_trajectory",
    "encode_trajectory",
    "latest_run",
    "read_metrics",
    "shares_of",
    "write_atomic",
]
