"""What rollout replicas keep of their samples: texts for people, trajectories for programs."""

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path

from cosmos_app.report import Sample
from cosmos_core.rundir import append_whole, cut_torn_line
from cosmos_core.trajectory import Trajectory, TrajectoryFormatError, decode_trajectory

_MOST_SHOWN = 6
_LENGTH = struct.Struct("<Q")
_BEGINS = b"CTRJ"  # as each encoded trajectory does


def text_of(trajectory: Trajectory, decode: Callable[[list[int]], str]) -> Sample:
    """Return what a trajectory says to a person: what was sampled, and all that was not.

    Args:
        trajectory: a sample.
        decode: returns the text of tokens.
    """
    sampled = trajectory.trainable
    return Sample(
        prompt=decode(trajectory.token_ids[~sampled].tolist()),
        response=decode(trajectory.token_ids[sampled].tolist()),
        reward=trajectory.reward,
        version=trajectory.newest_version,
    )


def append_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Add samples to a replica's file, one JSON line each, behind the last whole one."""
    lines = [
        {
            "prompt": sample.prompt,
            "response": sample.response,
            "reward": sample.reward,
            "version": sample.version,
        }
        for sample in samples
    ]
    data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    with _opened(path) as file:
        cut_torn_line(file)
        append_whole(file, data)


def last_samples(directory: Path, most: int = _MOST_SHOWN) -> list[Sample]:
    """Return some samples of the newest version, spread evenly over its prompts."""
    samples: list[Sample] = []
    for path in sorted(directory.glob("samples-*.jsonl")):
        for line in path.read_bytes().split(b"\n"):  # a text may have other ends of lines
            try:
                samples.append(Sample(**json.loads(line)))
            except (ValueError, TypeError):
                continue  # the torn last line of a replica that was killed, in mid-character too
    newest = max((sample.version for sample in samples), default=0)
    shown = sorted((s for s in samples if s.version == newest), key=lambda s: s.prompt)
    return shown[:: max(1, len(shown) // most)][:most]


def append_trajectories(path: Path, encoded: Iterable[bytes]) -> None:
    """Add encoded trajectories to a replica's file, each behind its length."""
    with _opened(path) as file:
        append_whole(file, b"".join(_LENGTH.pack(len(data)) + data for data in encoded))


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a replica's file.

    One that is torn is left out: the last of a process that was killed, whose successor goes on
    behind it.

    Raises:
        TrajectoryFormatError: if one that is whole is damaged, or of a newer format.
    """
    data = path.read_bytes()
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        begin = at + _LENGTH.size
        at = begin + length
        try:
            yield decode_trajectory(data[begin:at])
        except TrajectoryFormatError:
            after = at + _LENGTH.size
            if at <= len(data) and _BEGINS.startswith(data[after : after + len(_BEGINS)]):
                raise  # it ends where another begins
            found = data.find(_BEGINS, begin + 1)
            if found < 0:
                return
            at = found - _LENGTH.size


def _opened(path: Path) -> FileIO:
    """Open a file to append to; on a disk that is full nothing is: what follows stays readable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a+b", buffering=0)
