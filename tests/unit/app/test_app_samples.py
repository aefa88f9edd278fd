"""What is read back of the samples that rollout replicas kept."""

from pathlib import Path

import numpy as np
import pytest

from cosmos_app.report import Sample
from cosmos_app.samples import (
    append_samples,
    append_trajectories,
    last_samples,
    read_trajectories,
)
from cosmos_core.trajectory import (
    UNSAMPLED,
    Trajectory,
    TrajectoryFormatError,
    VersionSpan,
    encode_trajectory,
)


def test_texts_with_ends_of_lines_of_any_kind_are_samples_like_others(tmp_path: Path) -> None:
    path = tmp_path / "samples-rollout-0.jsonl"
    samples = [
        Sample(prompt=f"{index}", response=f"one{end}two", reward=1.0, version=3)
        for index, end in enumerate(("\n", "\r\n", "\x0c", "\x85", "\u2028", "\u2029"))
    ]
    append_samples(path, samples)
    assert last_samples(tmp_path) == samples


def test_a_line_torn_within_a_letter_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "samples-rollout-0.jsonl"
    samples = [Sample(prompt=p, response="é", reward=1.0, version=3) for p in ("a", "b")]
    append_samples(path, samples)
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex("é".encode()) + 1])
    assert last_samples(tmp_path) == samples[:1]


def test_a_torn_line_is_cut_off_before_more_is_written(tmp_path: Path) -> None:
    path = tmp_path / "samples-rollout-0.jsonl"
    samples = [Sample(prompt=p, response="é", reward=1.0, version=3) for p in "abc"]
    append_samples(path, samples[:2])
    path.write_bytes(path.read_bytes()[:-5])
    append_samples(path, samples[2:])
    assert last_samples(tmp_path) == [samples[0], samples[2]]
    assert len(path.read_bytes().splitlines()) == 2


def encoded(number: int) -> bytes:
    return encode_trajectory(
        Trajectory(
            prompt_id="p",
            group=f"train.0.{number}",
            sibling=0,
            attempt=0,
            token_ids=np.array([1, 2, 3], np.int32),
            logprobs=np.array([0, 0, -0.5], np.float32),
            trainable=np.array([0, 0, 1], np.bool_),
            versions=(VersionSpan(UNSAMPLED, 2), VersionSpan(3, 1)),
            rewards={},
            reward=0.0,
            finish_reason="stop",
        )
    )


@pytest.mark.parametrize("left", [1, 8, 9, 11, 12, 20, 90, -1])
def test_a_torn_trajectory_costs_only_itself_also_where_others_follow(
    tmp_path: Path, left: int
) -> None:
    path = tmp_path / "rollout-0.bin"
    append_trajectories(path, [encoded(0)])
    whole = path.stat().st_size
    append_trajectories(path, [encoded(1)])
    data = path.read_bytes()
    path.write_bytes(data[: whole + left] if left > 0 else data[:left])
    assert [t.group for t in read_trajectories(path)] == ["train.0.0"]
    append_trajectories(path, [encoded(2), encoded(3)])
    groups = [t.group for t in read_trajectories(path)]
    assert groups == ["train.0.0", "train.0.2", "train.0.3"]


def test_a_whole_trajectory_that_is_damaged_is_no_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "rollout-0.bin"
    append_trajectories(path, [encoded(0), encoded(1)])
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(TrajectoryFormatError, match="damaged"):
        list(read_trajectories(path))
