"""Metric records as JSON lines: a file that survives a crash and that every tool reads.

Numbers that JSON cannot say are written as the strings "NaN", "Infinity" and "-Infinity".
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from cosmos_core.errors import CosmosError
from cosmos_core.metrics.record import MetricRecord
from cosmos_core.rundir import append_whole, cut_torn_line

_UNSAYABLE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsFormatError(CosmosError, ValueError):
    """Raised for a line, other than a torn last one, that is no record."""


class JsonlSink:
    """Appends each record as one line by one write, so that a crash tears at most the last one.

    A torn last line, left by a process that was killed, is cut off when the file is opened.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        cut_torn_line(self._file)

    def write(self, record: MetricRecord) -> None:
        """Append the record; readers see it at once.

        Raises:
            OSError: if the disk is full; nothing of the record is left then.
        """
        append_whole(self._file, encode_record(record))

    def close(self) -> None:
        """Bring the file to disk and close it."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def encode_record(record: MetricRecord) -> bytes:
    """Return the record as one JSON line."""
    fields: dict[str, Any] = {
        "time_s": record.time_s,
        "role": record.role,
        "replica": record.replica,
        "step": record.step,
        "values": {name: _sayable(float(value)) for name, value in record.values.items()},
    }
    if record.note:
        fields["note"] = record.note
    return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def read_metrics(path: Path) -> list[MetricRecord]:
    """Read all records of a file, which another process may still be writing.

    Raises:
        MetricsFormatError: if a whole line is not a record; a torn last line is passed over.
    """
    *lines, torn = path.read_bytes().split(b"\n")
    del torn  # empty after a whole line
    return [decode_record(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def decode_record(line: bytes, where: str) -> MetricRecord:
    """Read one line of JSON back; ``where`` is how errors name it.

    Raises:
        MetricsFormatError: if it is not a record.
    """
    try:
        fields: dict[str, Any] = json.loads(line)
        return msgspec.convert({**fields, "values": _values(fields["values"])}, MetricRecord)
    except (ValueError, TypeError, KeyError, AttributeError, msgspec.ValidationError) as error:
        raise MetricsFormatError(
            f"{where}: not a metric record ({error}): {line[:80]!r}"
        ) from error


def _values(values: Mapping[str, float | str]) -> dict[str, float]:
    return {
        name: _UNSAYABLE[value] if isinstance(value, str) else float(value)
        for name, value in values.items()
    }


def _sayable(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value
