"""Records as TensorBoard event files, through TensorBoard's own writer: no torch, no TF."""

import contextlib
import struct
from pathlib import Path
from typing import Any

# Protobuf makes these classes while it imports, which a type checker cannot see.
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from cosmos_core.metrics.record import MediaRecord, MetricRecord


class TensorBoardSink:
    """Writes each replica's values to a folder of its own, tagged ``role/name``."""

    def __init__(self, folder: Path, *, flush_s: int) -> None:
        self._folder = folder
        self._flush_s = flush_s
        self._writers = dict[str, EventFileWriter]()

    def write(self, record: MetricRecord) -> None:
        """Queue the record's values as points at its step and time.

        Raises:
            OSError: if what was queued before could not be written; it may be written again then.
        """
        points = [
            Summary.Value(tag=f"{record.role}/{name}", simple_value=value)
            for name, value in record.values.items()
        ]
        self._add(
            record.replica,
            Event(wall_time=record.time_s, step=record.step, summary=Summary(value=points)),
        )

    def show(self, media: MediaRecord) -> None:
        """Queue PNG files as images tagged ``role/name/file``; TensorBoard shows no videos."""
        images = [
            Summary.Value(tag=f"{media.role}/{media.name}/{path.stem}", image=_image(path))
            for path in media.files
            if path.suffix == ".png"
        ]
        if images:
            self._add(
                media.replica,
                Event(wall_time=media.time_s, step=media.step, summary=Summary(value=images)),
            )

    def close(self) -> None:
        """Write out and close all files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _add(self, replica: str, event: Any) -> None:
        """Queue an event; a writer that could not write never will again, and is given up."""
        try:
            self._writer(replica).add_event(event)
        except OSError:
            if broken := self._writers.pop(replica, None):
                with contextlib.suppress(OSError):
                    broken.close()
            raise

    def _writer(self, replica: str) -> EventFileWriter:
        writer = self._writers.get(replica)
        if writer is None:
            writer = EventFileWriter(str(self._folder / replica), flush_secs=self._flush_s)
            self._writers[replica] = writer
        return writer


def _image(path: Path) -> Any:
    """Return a PNG file with its size, which the first chunk says (ISO 15948, 11.2.2)."""
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    return Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=data)
