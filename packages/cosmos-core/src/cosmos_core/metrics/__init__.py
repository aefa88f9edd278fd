"""Measurements: the record every process writes, and the sinks that records go to."""

from cosmos_core.metrics.config import (
    ConsoleSinkConfig,
    JsonlSinkConfig,
    MissingExtraError,
    MlflowSinkConfig,
    SinkConfig,
    SinkContext,
    SinkError,
    TensorBoardSinkConfig,
    WandbSinkConfig,
    open_sinks,
)
from cosmos_core.metrics.jsonl import (
    JsonlSink,
    MetricsFormatError,
    decode_record,
    read_metrics,
)
from cosmos_core.metrics.record import (
    FanOut,
    MediaRecord,
    MediaSink,
    MetricRecord,
    MetricSink,
    of_data_sets,
)

__all__ = [
    "ConsoleSinkConfig",
    "FanOut",
    "JsonlSink",
    "JsonlSinkConfig",
    "MediaRecord",
    "MediaSink",
    "MetricRecord",
    "MetricSink",
    "MetricsFormatError",
    "MissingExtraError",
    "MlflowSinkConfig",
    "SinkConfig",
    "SinkContext",
    "SinkError",
    "TensorBoardSinkConfig",
    "WandbSinkConfig",
    "decode_record",
    "of_data_sets",
    "open_sinks",
    "read_metrics",
]
