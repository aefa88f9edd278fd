"""Typed config, trajectories, metrics, run directory, controller and bus. Never imports torch."""

from cosmos_core.activity import ActivityMeter, shares_of
from cosmos_core.config import (
    ConfigError,
    ConfigProblem,
    FieldDoc,
    config_from_json,
    config_to_json,
    describe_config,
    load_config,
)
from cosmos_core.errors import CosmosError
from cosmos_core.metrics import FanOut, MetricRecord, MetricSink, read_metrics
from cosmos_core.rundir import RunDirectory, RunDirectoryError, latest_run, write_atomic
from cosmos_core.trajectory import (
    UNSAMPLED,
    FinishReason,
    TeacherScores,
    Trajectory,
    TrajectoryFormatError,
    VersionSpan,
    decode_trajectory,
    encode_trajectory,
)

__all__ = [
    "UNSAMPLED",
    "ActivityMeter",
    "ConfigError",
    "ConfigProblem",
    "CosmosError",
    "FanOut",
    "FieldDoc",
    "FinishReason",
    "MetricRecord",
    "MetricSink",
    "RunDirectory",
    "RunDirectoryError",
    "TeacherScores",
    "Trajectory",
    "TrajectoryFormatError",
    "VersionSpan",
    "config_from_json",
    "config_to_json",
    "decode_trajectory",
    "describe_config",
    "encode_trajectory",
    "latest_run",
    "load_config",
    "read_metrics",
    "shares_of",
    "write_atomic",
]
