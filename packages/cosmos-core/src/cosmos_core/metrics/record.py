"""Measurements and pictures of one process, and what anything that takes them in looks like."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec


class MetricRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Named values that one process measured at one moment.

    ``time_s`` is seconds since the epoch, ``role`` is "controller", "policy" or "rollout",
    ``replica`` the id of the process, and ``step`` the training step it belongs to. Names of values
    are words with units at the end (``loss``, ``transfer_s``); a slash groups them
    (``reward/exact``). ``note`` is for people: what they are to know of the step, if anything.
    """

    time_s: float
    role: str
    replica: str
    step: int
    values: Mapping[str, float]
    note: str = ""


def of_data_sets(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that data sets have (``data_set/NAME``), by the sets' names."""
    group = "data_set/"
    return {n.removeprefix(group): value for n, value in values.items() if n.startswith(group)}


class MetricSink(Protocol):
    """Takes records in, in any order of roles and steps, from one thread."""

    def write(self, record: MetricRecord) -> None:
        """Take one record; visible to readers at the latest after ``close``."""
        ...

    def close(self) -> None:
        """Write out what is held back and let go of files; may be called twice."""
        ...


class MediaRecord(msgspec.Struct, frozen=True):
    """Pictures and videos of one moment, as files that stay where they are.

    ``name`` says what they are (``validation``); the rest is as in ``MetricRecord``. Files are PNG
    and MP4; each is told apart by its name.
    """

    time_s: float
    role: str
    replica: str
    step: int
    name: str
    files: tuple[Path, ...]


@runtime_checkable
class MediaSink(Protocol):
    """A sink that has a place for pictures as well."""

    def show(self, media: MediaRecord) -> None:
        """Take pictures in; kinds of files that there is no place for are left out."""
        ...


class FanOut:
    """One sink in front of many: each record goes to all of them, in order.

    A record that one of them did not take may be written again, as when a disk was full: it goes to
    that one and those after it.

    Attributes:
        at: the sink, by its class, that was called last to write or close; another thread may ask.
    """

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self.at = ""
        self._sinks = tuple(sinks)
        self._refused: MetricRecord | None = None
        self._num_taken = 0

    def write(self, record: MetricRecord) -> None:
        """Hand the record to every sink that has not taken it yet."""
        if record is not self._refused:
            self._num_taken = 0
        self._refused = record
        for sink in self._sinks[self._num_taken :]:
            self.at = type(sink).__name__
            sink.write(record)
            self._num_taken += 1
        self._refused = None

    def show(self, media: MediaRecord) -> None:
        """Hand pictures to every sink that has a place for them."""
        for sink in self._sinks:
            if isinstance(sink, MediaSink):
                sink.show(media)

    def close(self) -> None:
        """Close every sink, the last one first, also when one of them fails to."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(self._close, sink)

    def _close(self, sink: MetricSink) -> None:
        self.at = type(sink).__name__
        sink.close()
