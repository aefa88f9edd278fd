"""A trajectory: the tokens of one sample, how they were sampled, and what they earned.

One and many turns, language and diffusion, are the same type: a sequence of T steps of which some
are trained on. It lives on the host, in numpy, and travels as bytes.
"""

import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from cosmos_core.errors import CosmosError

FinishReason = Literal["stop", "length", "abort"]
UNSAMPLED = -1

# What the payload store holds and replicas hand to each other. Little-endian throughout; arrays are
# 8-byte aligned, so that a decoded one is a view of the input:
#
#   magic "CTRJ" | format u16 | 0 u16 | header length u32 | crc32 of the rest u32      16 bytes
#   header: msgpack of everything but the arrays, zero padding to a multiple of 8
#   token_ids int32[T], logprobs float32[T], trainable uint8[T]
#   in format 2, padded likewise: teacher's logprobs float32[T], top_logprobs float32[T, K],
#   top_token_ids int32[T, K]
_MAGIC = b"CTRJ"
_FORMAT = 1
_FORMAT_WITH_TEACHER = 2
_PREFIX = struct.Struct("<4sHHII")
_BYTES_PER_STEP = 4 + 4 + 1
_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")


class VersionSpan(NamedTuple):
    """``length`` consecutive steps sampled by weight ``version`` (``UNSAMPLED``: by nobody)."""

    version: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TeacherScores:
    """What another model makes of T tokens, each given those before it.

    Attributes:
        logprobs: float32[T], log-probability of each token; 0 where it has not been asked.
        top_logprobs: float32[T, K], those of the K likeliest tokens, most likely first.
        top_token_ids: int32[T, K], which tokens these are. K is 0 where only the tokens themselves
            are scored.
    """

    logprobs: npt.NDArray[np.float32]
    top_logprobs: npt.NDArray[np.float32]
    top_token_ids: npt.NDArray[np.int32]

    @property
    def top_k(self) -> int:
        """K."""
        return int(self.top_logprobs.shape[-1])

    def where(self, mask: npt.NDArray[np.bool_]) -> "TeacherScores":
        """Return the scores of the tokens where ``mask`` is true, and 0 elsewhere."""
        return TeacherScores(
            logprobs=np.where(mask, self.logprobs, np.float32(0.0)),
            top_logprobs=np.where(mask[:, None], self.top_logprobs, np.float32(0.0)),
            top_token_ids=np.where(mask[:, None], self.top_token_ids, np.int32(0)),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """One sample of a group, T steps long, prompt included; checked on construction.

    A prompt of 3 tokens, answered by 4, of which the last 2 came after a weight update::

        token_ids  [ 7  8  9 |  4   4   5   2 ]
        logprobs   [ 0  0  0 | -.3 -.1 -.9 -.2]
        trainable  [ 0  0  0 |  1   1   1   1 ]
        versions   (UNSAMPLED, 3) (5, 2) (6, 2)      oldest_version 5, newest_version 6

    Attributes:
        prompt_id: identity of the prompt in its data set.
        group: key of the issued group, ``str(GroupId)``.
        sibling: position of the sample in its group.
        attempt: which attempt at the group produced it.
        token_ids: int32[T], prompt and response as the model saw them.
        logprobs: float32[T], log-probability under the behaviour policy; 0 where not trainable.
        trainable: bool[T], true for the tokens the model sampled.
        versions: run-length coded weight version of each step; lengths sum to T.
        rewards: each named reward.
        reward: their weighted total.
        finish_reason: why sampling ended.
        metrics: anything worth averaging over samples.
        teacher: what a teacher makes of the tokens, if one was asked; 0 where not trainable.
        images: references of the pictures among the tokens, in order (`cosmos_core.images`).

    Raises:
        ValueError: if arrays disagree in length or type, a trained token has no weight version or
            no finite log-probability, or the reward is not finite.
    """

    prompt_id: str
    group: str
    sibling: int
    attempt: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    trainable: npt.NDArray[np.bool_]
    versions: tuple[VersionSpan, ...]
    rewards: Mapping[str, float]
    reward: float
    finish_reason: FinishReason
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    teacher: TeacherScores | None = None
    images: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problem = (
            _array_problem(self)
            or _version_problem(self)
            or _value_problem(self)
            or _teacher_problem(self)
        )
        if problem:
            raise ValueError(f"{problem}: trajectory {self.group}/{self.sibling}")

    @property
    def num_tokens(self) -> int:
        """T, prompt included."""
        return len(self.token_ids)

    @property
    def num_trainable(self) -> int:
        """How many tokens the model sampled."""
        return int(np.count_nonzero(self.trainable))

    @property
    def oldest_version(self) -> int:
        """Oldest weight version among the trained tokens; ``UNSAMPLED`` if there are none."""
        return min(self._trained_versions(), default=UNSAMPLED)

    @property
    def newest_version(self) -> int:
        """Newest weight version among the trained tokens; ``UNSAMPLED`` if there are none."""
        return max(self._trained_versions(), default=UNSAMPLED)

    def version_of_each_step(self) -> npt.NDArray[np.int32]:
        """Spell the spans out: int32[T], ``UNSAMPLED`` where nobody sampled."""
        versions = np.array([span.version for span in self.versions], dtype=np.int32)
        return np.repeat(versions, [span.length for span in self.versions])

    def _trained_versions(self) -> list[int]:
        start, versions = 0, list[int]()
        for span in self.versions:
            if self.trainable[start : start + span.length].any():
                versions.append(span.version)
            start += span.length
        return versions


def _array_problem(trajectory: Trajectory) -> str:
    num_tokens = len(trajectory.token_ids)
    for name, array, dtype in (
        ("token_ids", trajectory.token_ids, np.int32),
        ("logprobs", trajectory.logprobs, np.float32),
        ("trainable", trajectory.trainable, np.bool_),
    ):
        if array.dtype != dtype:
            return f"{name} is {array.dtype}, it has to be {np.dtype(dtype)}"
        if array.shape != (num_tokens,):
            return f"{name} has shape {array.shape}, token_ids has {num_tokens} tokens"
    return ""


def _version_problem(trajectory: Trajectory) -> str:
    total = sum(span.length for span in trajectory.versions)
    if total != trajectory.num_tokens:
        return f"version spans cover {total} steps, there are {trajectory.num_tokens}"
    start = 0
    for span in trajectory.versions:
        where = f"steps {start}:{start + span.length}"
        if span.length < 1 or span.version < UNSAMPLED:
            return f"{where} are {span}; lengths start at 1, versions at {UNSAMPLED}"
        if span.version == UNSAMPLED and trajectory.trainable[start : start + span.length].any():
            return f"{where} hold trained tokens but no weight version sampled them"
        start += span.length
    return ""


def _value_problem(trajectory: Trajectory) -> str:
    if not np.isfinite(trajectory.logprobs[trajectory.trainable]).all():
        return "a trained token has a log-probability that is not finite"
    if np.any(trajectory.logprobs[~trajectory.trainable]):
        return "log-probabilities have to be 0 where a token is not trained on"
    if not math.isfinite(trajectory.reward):
        return f"the reward is {trajectory.reward}; a sample without a reward has failed"
    return ""


def _teacher_problem(trajectory: Trajectory) -> str:
    teacher = trajectory.teacher
    if teacher is None:
        return ""
    steps, top_k = trajectory.num_tokens, teacher.top_k
    for name, array, dtype, shape in (
        ("logprobs", teacher.logprobs, np.float32, (steps,)),
        ("top_logprobs", teacher.top_logprobs, np.float32, (steps, top_k)),
        ("top_token_ids", teacher.top_token_ids, np.int32, (steps, top_k)),
    ):
        if array.dtype != dtype or array.shape != shape:
            return (
                f"the teacher's {name} is {array.dtype}{list(array.shape)}, it has to be "
                f"{np.dtype(dtype)}{list(shape)}"
            )
    if not np.isfinite(teacher.logprobs[trajectory.trainable]).all():
        return "the teacher gives a trained token a log-probability that is not finite"
    return ""


class TrajectoryFormatError(CosmosError, ValueError):
    """Raised by `decode_trajectory` for bytes that are not a whole trajectory of a known format."""


class _Header(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    prompt_id: str
    group: str
    sibling: int
    attempt: int
    num_tokens: int
    versions: tuple[tuple[int, int], ...]
    rewards: dict[str, float]
    reward: float
    finish_reason: FinishReason
    metrics: dict[str, float]
    top_k: int = 0  # of the teacher
    images: tuple[str, ...] = ()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Header)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Return the trajectory as bytes; `decode_trajectory` gives an equal one back."""
    header = _ENCODER.encode(
        _Header(
            prompt_id=trajectory.prompt_id,
            group=trajectory.group,
            sibling=trajectory.sibling,
            attempt=trajectory.attempt,
            num_tokens=trajectory.num_tokens,
            versions=tuple((int(span.version), int(span.length)) for span in trajectory.versions),
            rewards={name: float(value) for name, value in trajectory.rewards.items()},
            reward=float(trajectory.reward),
            finish_reason=trajectory.finish_reason,
            metrics={name: float(value) for name, value in trajectory.metrics.items()},
            top_k=trajectory.teacher.top_k if trajectory.teacher else 0,
            images=trajectory.images,
        )
    )
    body = b"".join(
        (
            header,
            bytes(_padding(len(header))),
            trajectory.token_ids.astype(_INT32, copy=False).tobytes(),
            trajectory.logprobs.astype(_FLOAT32, copy=False).tobytes(),
            trajectory.trainable.tobytes(),
            *_teacher_parts(trajectory),
        )
    )
    version = _FORMAT if trajectory.teacher is None else _FORMAT_WITH_TEACHER
    return _PREFIX.pack(_MAGIC, version, 0, len(header), zlib.crc32(body)) + body


def _teacher_parts(trajectory: Trajectory) -> tuple[bytes, ...]:
    teacher = trajectory.teacher
    if teacher is None:
        return ()
    return (
        bytes(_padding(trajectory.num_tokens)),
        teacher.logprobs.astype(_FLOAT32, copy=False).tobytes(),
        teacher.top_logprobs.astype(_FLOAT32, copy=False).tobytes(),
        teacher.top_token_ids.astype(_INT32, copy=False).tobytes(),
    )


def decode_trajectory(data: bytes | bytearray | memoryview) -> Trajectory:
    """Read a trajectory back; its arrays are read-only views of ``data``, not copies.

    Raises:
        TrajectoryFormatError: if the bytes are cut short, damaged, of a newer format, or no
            trajectory at all.
    """
    view = memoryview(data).toreadonly()
    has_teacher, header_length = _check_prefix(view)
    body = view[_PREFIX.size :]
    try:
        header = _DECODER.decode(body[:header_length])
    except msgspec.DecodeError as error:
        raise TrajectoryFormatError(f"trajectory header is damaged: {error}") from error
    start, steps = header_length + _padding(header_length), header.num_tokens
    expected = end = start + steps * _BYTES_PER_STEP
    if has_teacher:
        end += _padding(steps)
        expected = end + steps * 4 * (1 + 2 * header.top_k)
    if steps < 0 or header.top_k < 0 or len(body) != expected:
        raise TrajectoryFormatError(
            f"trajectory {header.group}/{header.sibling} of {steps} tokens needs "
            f"{_PREFIX.size + expected} bytes, got {len(view)}"
        )
    try:
        return Trajectory(
            prompt_id=header.prompt_id,
            group=header.group,
            sibling=header.sibling,
            attempt=header.attempt,
            token_ids=np.frombuffer(body, _INT32, steps, start),
            logprobs=np.frombuffer(body, _FLOAT32, steps, start + 4 * steps),
            trainable=np.frombuffer(body, np.bool_, steps, start + 8 * steps),
            versions=tuple(VersionSpan(version, length) for version, length in header.versions),
            rewards=header.rewards,
            reward=header.reward,
            finish_reason=header.finish_reason,
            metrics=header.metrics,
            teacher=_read_teacher(body, end, steps, header.top_k) if has_teacher else None,
            images=header.images,
        )
    except ValueError as error:
        raise TrajectoryFormatError(f"not a valid trajectory: {error}") from error


def _read_teacher(body: memoryview, start: int, steps: int, top_k: int) -> TeacherScores:
    tops = start + 4 * steps
    size = steps * top_k
    return TeacherScores(
        logprobs=np.frombuffer(body, _FLOAT32, steps, start),
        top_logprobs=np.frombuffer(body, _FLOAT32, size, tops).reshape(steps, top_k),
        top_token_ids=np.frombuffer(body, _INT32, size, tops + 4 * size).reshape(steps, top_k),
    )


def _check_prefix(view: memoryview) -> tuple[bool, int]:
    """Return whether a teacher's scores follow, and how long the header is."""
    if len(view) < _PREFIX.size:
        raise TrajectoryFormatError(
            f"{len(view)} bytes are too few for a trajectory, which has at least {_PREFIX.size}"
        )
    magic, version, _, header_length, checksum = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise TrajectoryFormatError(f"not a trajectory: starts with {magic!r}, not {_MAGIC!r}")
    if version not in (_FORMAT, _FORMAT_WITH_TEACHER):
        raise TrajectoryFormatError(
            f"trajectory format {version}; this cosmos_core reads format {_FORMAT} and "
            f"{_FORMAT_WITH_TEACHER}: bring both sides to one version"
        )
    if zlib.crc32(view[_PREFIX.size :]) != checksum:
        raise TrajectoryFormatError(
            f"trajectory is damaged or cut short: checksum of its {len(view)} bytes does not match"
        )
    return version == _FORMAT_WITH_TEACHER, header_length


def _padding(header_length: int) -> int:
    return -header_length % 8
