"""Samples for people to look at while a run goes on: text in spans of equal weight version.

A rollout replica writes one every few seconds to ``samples/shown-REPLICA.jsonl``, whatever its
rate, and prefers one that weights changed under.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from cosmos_app.bounded_files import append_bounded
from cosmos_core.trajectory import UNSAMPLED, Trajectory

_EVERY_S = 2.0
_MOST_TOKENS = 2000
_MOST_BYTES = 64 << 20
_MOST_PICTURES = 4

Decode = Callable[[list[int]], str]
"""Turns token ids into text."""


class ShownSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample; ``spans`` are (weight version or -1, number of tokens, text), in order.

    ``num_left_out`` tokens at the end of a very long sample are not shown. ``images`` are
    references of its first pictures.
    """

    time_s: float
    replica: str
    group: str
    reward: float
    finish_reason: str
    spans: tuple[tuple[int, int, str], ...]
    num_left_out: int = 0
    images: tuple[str, ...] = ()


_DECODER = msgspec.json.Decoder(ShownSample)


def shown_sample(
    trajectory: Trajectory, decode: Decode, *, replica: str, time_s: float
) -> ShownSample:
    """Return a trajectory as text.

    A character whose bytes are divided between two versions shows as a replacement character. The
    many tokens of a picture count as one.
    """
    spans = list[tuple[int, int, str]]()
    start, room = 0, _MOST_TOKENS
    for version, length in trajectory.versions:
        tokens = trajectory.token_ids[start : start + length]
        if trajectory.images and version == UNSAMPLED:
            tokens = tokens[np.diff(tokens, prepend=-1) != 0]
        shown = tokens[:room].tolist()
        if shown:
            spans.append((version, len(shown), decode(shown)))
        room -= len(tokens)
        start += length
    return ShownSample(
        time_s=time_s,
        replica=replica,
        group=trajectory.group,
        reward=trajectory.reward,
        finish_reason=trajectory.finish_reason,
        spans=tuple(spans),
        num_left_out=max(0, -room),
        images=trajectory.images[:_MOST_PICTURES],
    )


class SampleShow:
    """Writes one sample every two seconds at most; of very many the oldest go.

    Args:
        folder: where the file goes.
        replica: whose samples they are.
        decode: tokens to text.
        clock: seconds since the epoch.
    """

    def __init__(
        self, folder: Path, replica: str, decode: Decode, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = folder / f"shown-{replica}.jsonl"
        self._replica = replica
        self._decode = decode
        self._clock = clock
        self._next_s = 0.0

    def offer(self, trajectories: Sequence[Trajectory]) -> None:
        """Take the samples of a group; most are passed over."""
        now = self._clock()
        if now < self._next_s or not trajectories:
            return
        self._next_s = now + _EVERY_S
        chosen = max(trajectories, key=lambda trajectory: len(trajectory.versions))
        line = shown_sample(chosen, self._decode, replica=self._replica, time_s=now)
        # A disk that is full costs the show, not the replica.
        with contextlib.suppress(OSError):
            self._append(msgspec.json.encode(line) + b"\n")

    def _append(self, line: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        append_bounded(self._path, line, most_bytes=_MOST_BYTES)


def parse_shown_sample(line: bytes) -> ShownSample | None:
    """Read a line of such a file; none for one that is torn."""
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
