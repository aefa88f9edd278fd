"""Metric records as TensorBoard event files, through TensorBoard's own writer: no torch, no TF."""

from pathlib import Path

# Protobuf makes these classes while it imports, which a type checker cannot see.
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from cosmos_core.metrics.record import MetricRecord


class TensorBoardSink:
    """Writes each replica's values to a folder of its own, tagged ``role/name``."""

    def __init__(self, folder: Path, *, flush_s: int) -> None:
        self._folder = folder
        self._flush_s = flush_s
        self._writers = dict[str, EventFileWriter]()

    def write(self, record: MetricRecord) -> None:
        """Queue the record's values as points at its step and time."""
        writer = self._writers.get(record.replica)
        if writer is None:
            folder = str(self._folder / record.replica)
            writer = EventFileWriter(folder, flush_secs=self._flush_s)
            self._writers[record.replica] = writer
        points = [
            Summary.Value(tag=f"{record.role}/{name}", simple_value=value)
            for name, value in record.values.items()
        ]
        writer.add_event(
            Event(wall_time=record.time_s, step=record.step, summary=Summary(value=points))
        )

    def close(self) -> None:
        """Write out and close all files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
