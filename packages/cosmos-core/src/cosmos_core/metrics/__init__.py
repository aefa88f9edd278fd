"""Measurements: the record every process writes, and where records go."""

from cosmos_core.metrics.jsonl import JsonlSink, MetricsFormatError, read_metrics
from cosmos_core.metrics.record import FanOut, MetricRecord, MetricSink

__all__ = [
    "FanOut",
    "JsonlSink",
    "MetricRecord",
    "MetricSink",
    "MetricsFormatError",
    "read_metrics",
]
