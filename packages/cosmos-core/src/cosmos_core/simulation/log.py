"""One log for runs and simulations: what every replica did when, in seconds of one clock.

A log is a file of JSON lines, one record each; replicas of a run write one each, since on one
machine their monotonic clocks are the same::

    {"type":"Span","role":"rollout","replica":"rollout-0","activity":"decode","start_s":3.2,...}
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from cosmos_core.messages import Role, Train

Activity = Literal[
    "wait_data",
    "fwd_bwd",
    "optim",
    "push_exposed",
    "checkpoint",
    "eval",
    "decode",
    "idle_no_work",
    "gated_staleness",
    "paused_for_weights",
    "swap",
    "env_wait",
    "reward_wait",
]
"""The first six are a policy replica's, the others a rollout replica's.

``eval`` measures on held-out data, or waits for a validation.
``idle_no_work`` holds no group: it is on its way, or there is none yet; ``gated_staleness`` holds
none since admission withholds it. ``paused_for_weights`` waits for a transfer, ``swap`` puts its
result in place. With ``env_wait`` it decodes nothing since samples wait for their environment,
whatever else it holds; with ``reward_wait`` all that it holds waits for rewards.
"""


class Span(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A replica did one thing from ``start_s`` to ``end_s``.

    ``version`` is the weight version it held; ``width`` how many requests it decoded at once and
    ``tokens`` how many tokens that gave, both 0 for everything but ``decode``.
    """

    role: Role
    replica: str
    activity: Activity
    start_s: float
    end_s: float
    version: int = -1
    width: int = 0
    tokens: float = 0.0


class TrainedSample(msgspec.Struct, frozen=True, array_like=True):
    """A sample of a step: its tokens, and the versions that sampled its first and last one."""

    num_tokens: int
    oldest_version: int
    newest_version: int


class StepTaken(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """An optimizer step and what it was taken on.

    In a run ``keys`` are those of the samples, each of which tells its group, attempt and sibling.
    """

    step: int
    start_s: float
    end_s: float
    samples: tuple[TrainedSample, ...]
    keys: tuple[str, ...] = ()


class QueueDepths(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the controller held at a time.

    The first four count groups by stage. ``denied`` are slots that stood empty because admission
    withheld a prompt; the last four are sums since the start.
    """

    time_s: float
    waiting: int
    generating: int
    ready: int
    training: int
    denied: int
    dropped: int
    consumed: int
    generated_samples: int
    generated_tokens: int


LogRecord = Span | StepTaken | QueueDepths
_DECODER = msgspec.json.Decoder(LogRecord)
_ENCODER = msgspec.json.Encoder()


def write_log(path: Path, records: Iterable[LogRecord]) -> None:
    """Append records to a file."""
    with path.open("ab") as file:
        file.write(encode_log(records))


def encode_log(records: Iterable[LogRecord]) -> bytes:
    """Return records as lines."""
    return b"".join(_ENCODER.encode(record) + b"\n" for record in records)


def read_log(paths: Sequence[Path]) -> list[LogRecord]:
    """Return the records of several files, one file after the other.

    Raises:
        msgspec.ValidationError: if a line is not a record.
    """
    return [
        _DECODER.decode(line) for path in paths for line in path.read_bytes().splitlines() if line
    ]


def step_taken(train: Train, start_s: float, end_s: float, *, with_keys: bool = False) -> StepTaken:
    """Return the record of a step that was ordered by ``train``, with the samples' keys or not."""
    refs = [ref for group in train.groups for ref in group if ref.status == "completed"]
    return StepTaken(
        step=train.step,
        start_s=start_s,
        end_s=end_s,
        samples=tuple(
            TrainedSample(ref.num_tokens, ref.oldest_version, ref.newest_version) for ref in refs
        ),
        keys=tuple(ref.key for ref in refs) if with_keys else (),
    )
