"""What sinks have written of a run, read back by replica: none by the code that wrote it."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

_BLOCK = 32 << 10
_FILE_HEADER = 7
_WHOLE, _LAST = 1, 4


def wandb_history(path: Path) -> list[dict[str, float]]:
    """Read the history out of a ``.wandb`` file, as far as it is written.

    It is a header and a LevelDB log of protobuf records: blocks of 32 KiB of pieces (checksum u32,
    length u16, kind u8, data); a record that does not fit into its block goes on in the next one.
    """
    from wandb.proto import wandb_internal_pb2

    records = map(wandb_internal_pb2.Record.FromString, _records(path.read_bytes()))
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        for items in (r.history.item for r in records if r.WhichOneof("record_type") == "history")
    ]


def _records(data: bytes) -> Iterator[bytes]:
    position, record = _FILE_HEADER, b""
    while position + _FILE_HEADER <= len(data):
        if (left := _BLOCK - position % _BLOCK) < _FILE_HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += _FILE_HEADER
        if position + length > len(data):
            return
        record += data[position : position + length]
        position += length
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""


def wandb_values(run: Path, replica: str, name: str) -> list[tuple[int, float]]:
    """Return the step and value of each point of a replica, from a run kept offline."""
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    rows = [row for row in wandb_history(file) if f"{replica}/{name}" in row]
    return [(int(row[f"{replica}/step"]), row[f"{replica}/{name}"]) for row in rows]


def tensorboard_values(run: Path, replica: str, tag: str) -> list[tuple[int, float]]:
    """Return the step and value of each point of a replica; values are float32."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard" / replica), size_guidance={"scalars": 0})
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(tag)]
