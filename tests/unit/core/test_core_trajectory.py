"""The trajectory type: what it refuses, what it derives, and its bytes."""

import struct
import zlib
from dataclasses import fields, replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from cosmos_core.trajectory import (
    UNSAMPLED,
    TeacherScores,
    Trajectory,
    TrajectoryFormatError,
    VersionSpan,
    decode_trajectory,
    encode_trajectory,
)


def answer(**changes: Any) -> Trajectory:
    """Three prompt tokens, two sampled by version 5 and two by version 6."""
    values: dict[str, Any] = {
        "prompt_id": "add-17",
        "group": "train.0.17",
        "sibling": 2,
        "attempt": 1,
        "token_ids": np.array([7, 8, 9, 4, 4, 5, 2], np.int32),
        "logprobs": np.array([0, 0, 0, -0.3, -0.1, -0.9, -0.2], np.float32),
        "trainable": np.array([0, 0, 0, 1, 1, 1, 1], np.bool_),
        "versions": (VersionSpan(UNSAMPLED, 3), VersionSpan(5, 2), VersionSpan(6, 2)),
        "rewards": {"exact": 1.0},
        "reward": 1.0,
        "finish_reason": "stop",
        "metrics": {"turns": 1.0},
    }
    return Trajectory(**{**values, **changes})


def assert_same(left: Trajectory, right: Trajectory) -> None:
    for field in fields(Trajectory):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        else:
            assert one == other


def test_versions_are_those_of_the_trained_tokens():
    trajectory = answer()
    assert (trajectory.oldest_version, trajectory.newest_version) == (5, 6)
    assert trajectory.version_of_each_step().tolist() == [-1, -1, -1, 5, 5, 6, 6]
    assert (trajectory.num_tokens, trajectory.num_trainable) == (7, 4)


def test_a_span_of_untrained_tokens_does_not_count_as_oldest():
    # A tool's answer, recorded under version 2, is in the context but is not trained on.
    trajectory = answer(
        trainable=np.array([0, 0, 0, 0, 0, 1, 1], np.bool_),
        logprobs=np.array([0, 0, 0, 0, 0, -0.9, -0.2], np.float32),
        versions=(VersionSpan(UNSAMPLED, 3), VersionSpan(2, 2), VersionSpan(6, 2)),
    )
    assert (trajectory.oldest_version, trajectory.newest_version) == (6, 6)


def test_no_trained_token_means_no_version():
    nothing = answer(
        trainable=np.zeros(7, np.bool_),
        logprobs=np.zeros(7, np.float32),
        versions=(VersionSpan(UNSAMPLED, 7),),
    )
    assert (nothing.oldest_version, nothing.newest_version) == (UNSAMPLED, UNSAMPLED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.arange(7)}, "token_ids is int64, it has to be int32"),
        ({"logprobs": np.zeros(6, np.float32)}, r"logprobs has shape \(6,\)"),
        ({"trainable": np.zeros((7, 1), np.bool_)}, r"trainable has shape \(7, 1\)"),
        ({"versions": (VersionSpan(5, 6),)}, "cover 6 steps, there are 7"),
        ({"versions": (VersionSpan(5, 7), VersionSpan(6, 0))}, "steps 7:7"),
        ({"versions": (VersionSpan(-2, 7),)}, "steps 0:7"),
        ({"versions": (VersionSpan(UNSAMPLED, 4), VersionSpan(5, 3))}, "no weight version"),
        ({"logprobs": np.array([0, 0, 0, 0, 0, 0, np.nan], np.float32)}, "not finite"),
        ({"logprobs": np.array([-1, 0, 0, 0, 0, 0, 0], np.float32)}, "have to be 0"),
        ({"reward": float("nan")}, "the reward is nan"),
    ],
)
def test_what_cannot_be_trained_on_cannot_be_built(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=rf"{message}.*: trajectory train\.0\.17/2$"):
        answer(**changes)


def test_decoded_arrays_are_aligned_read_only_views_of_the_bytes():
    data = encode_trajectory(answer())
    decoded = decode_trajectory(data)
    whole = np.frombuffer(data, np.uint8)
    for array in (decoded.token_ids, decoded.logprobs, decoded.trainable):
        assert np.shares_memory(array, whole)
        assert array.flags.aligned
        assert not array.flags.writeable


def test_the_layout_is_the_documented_one():
    # A change here needs a new format number: bytes of an older run would be misread.
    data = encode_trajectory(answer())
    magic, version, zero, header_length, checksum = struct.unpack_from("<4sHHII", data)
    assert (magic, version, zero, checksum) == (b"CTRJ", 1, 0, zlib.crc32(data[16:]))
    start = 16 + header_length + -header_length % 8
    assert np.frombuffer(data, "<i4", 7, start).tolist() == [7, 8, 9, 4, 4, 5, 2]
    assert data[-7:] == bytes([0, 0, 0, 1, 1, 1, 1])


def test_numpy_scalars_are_written_as_numbers():
    trajectory = answer(reward=np.float32(0.5), rewards={"exact": np.float32(0.5)})
    assert decode_trajectory(encode_trajectory(trajectory)).rewards == {"exact": 0.5}


@pytest.mark.parametrize("kept", range(0, 140, 7))
def test_bytes_cut_short_are_refused(kept: int):
    data = encode_trajectory(answer())
    assert kept < len(data)
    with pytest.raises(TrajectoryFormatError):
        decode_trajectory(data[:kept])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"JSON" + data[4:], "not a trajectory"),
        (lambda data: data[:4] + b"\x03\x00" + data[6:], "format 3; this cosmos_core reads"),
        (lambda data: data[:-1] + b"\x07", "checksum"),
        (lambda data: data + b"\x00", "checksum"),
        (lambda data: _with_body(data, b"\xc1" * 40), "header is damaged"),
        (lambda data: _with_body(data, data[16:] + b"\x00"), r"7 tokens needs \d+ bytes"),
    ],
)
def test_damaged_bytes_are_refused_by_name(damage: Any, message: str):
    with pytest.raises(TrajectoryFormatError, match=message):
        decode_trajectory(damage(encode_trajectory(answer())))


def _with_body(data: bytes, body: bytes) -> bytes:
    """Put another body behind the prefix, under a checksum that fits it."""
    return data[:12] + struct.pack("<I", zlib.crc32(body)) + body


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    spans = draw(st.lists(st.tuples(st.integers(UNSAMPLED, 2**40), st.integers(1, 20)), max_size=6))
    sampled = np.array([v != UNSAMPLED for v, length in spans for _ in range(length)], np.bool_)
    num_tokens = len(sampled)
    trainable = sampled & np.array(
        draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)), np.bool_
    )
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    names = st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3)
    return answer(
        prompt_id=draw(st.text(max_size=8)),
        token_ids=random.integers(-(2**31), 2**31, num_tokens).astype(np.int32),
        logprobs=np.where(trainable, -random.random(num_tokens), 0).astype(np.float32),
        trainable=trainable,
        versions=tuple(VersionSpan(*span) for span in spans),
        rewards=draw(names),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        metrics=draw(names),
        images=tuple(draw(st.lists(st.text(max_size=9), max_size=3))),
    )


@given(trajectories())
def test_what_is_encoded_is_what_is_decoded(trajectory: Trajectory):
    assert_same(decode_trajectory(encode_trajectory(trajectory)), trajectory)


def taught(top_k: int, **changes: Any) -> TeacherScores:
    """Scores of the seven tokens of `answer`, K candidates each."""
    values: dict[str, Any] = {
        "logprobs": np.array([0, 0, 0, -1.5, -0.25, -2, -0.125], np.float32),
        "top_logprobs": -np.arange(7 * top_k, dtype=np.float32).reshape(7, top_k),
        "top_token_ids": np.arange(7 * top_k, dtype=np.int32).reshape(7, top_k),
    }
    return TeacherScores(**{**values, **changes})


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_teachers_scores_travel_with_the_tokens(top_k: int):
    scores = taught(top_k)
    data = encode_trajectory(answer(teacher=scores))
    read = decode_trajectory(data).teacher
    assert read is not None
    assert read.top_k == top_k
    for field in fields(TeacherScores):
        one, other = getattr(scores, field.name), getattr(read, field.name)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)
        assert other.ctypes.data % 4 == 0
    assert struct.unpack_from("<H", data, 4) == (2,)  # format 1 is one without a teacher
    assert struct.unpack_from("<H", encode_trajectory(answer()), 4) == (1,)


def test_a_teachers_scores_can_be_had_of_some_tokens_alone():
    kept = taught(2).where(np.array([0, 0, 0, 0, 0, 1, 0], np.bool_))
    assert kept.logprobs.tolist() == [0, 0, 0, 0, 0, -2, 0]
    assert kept.top_logprobs[5].tolist() == [-10, -11]
    assert kept.top_token_ids[4].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": np.zeros(6, np.float32)}, r"teacher's logprobs is float32\[6\]"),
        ({"top_token_ids": np.zeros((7, 2), np.int32)}, r"top_token_ids is int32\[7, 2\]"),
        ({"logprobs": np.full(7, -np.inf, np.float32)}, "that is not finite"),
    ],
)
def test_a_teachers_scores_have_to_fit(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        answer(teacher=taught(3, **changes))


def test_an_encoded_trajectory_is_little_more_than_its_arrays():
    long = answer(
        token_ids=np.zeros(4096, np.int32),
        logprobs=np.zeros(4096, np.float32),
        trainable=np.zeros(4096, np.bool_),
        versions=(VersionSpan(UNSAMPLED, 4096),),
    )
    assert len(encode_trajectory(long)) < 9 * 4096 + 128
    assert_same(replace(long), decode_trajectory(encode_trajectory(long)))
