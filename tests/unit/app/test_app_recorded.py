"""What a run records for people: events, and samples in spans of equal weight version."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from full_disks import no_file_longer_than

from cosmos_app.bounded_files import append_bounded, before_of
from cosmos_app.event_log import EventLog, read_events, tell_event
from cosmos_app.samples import append_trajectories, read_trajectories
from cosmos_app.shown_samples import SampleShow, parse_shown_sample, shown_sample
from cosmos_core.messages import GroupFailed, GroupFinished, GroupId, Progress, SampleRef, Tick
from cosmos_core.trajectory import UNSAMPLED, Trajectory, VersionSpan, encode_trajectory


def trajectory(
    *versions: tuple[int, int], num_tokens: int | None = None, reward: float = 1.0
) -> Trajectory:
    total = num_tokens or sum(length for _, length in versions)
    sampled = np.repeat([v != UNSAMPLED for v, _ in versions], [n for _, n in versions])
    return Trajectory(
        prompt_id="p",
        group="train.0.1",
        sibling=0,
        attempt=0,
        token_ids=np.arange(total, dtype=np.int32),
        logprobs=np.where(sampled, -0.5, 0.0).astype(np.float32),
        trainable=sampled,
        versions=tuple(VersionSpan(*span) for span in versions),
        rewards={},
        reward=reward,
        finish_reason="stop",
    )


def letters(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def test_a_sample_is_divided_where_its_versions_change() -> None:
    shown = shown_sample(
        trajectory((UNSAMPLED, 2), (5, 3), (6, 1)), letters, replica="rollout-0", time_s=1.0
    )
    assert shown.spans == ((-1, 2, "ab"), (5, 3, "cde"), (6, 1, "f"))
    assert shown.num_left_out == 0


def test_a_very_long_sample_is_cut_and_says_how_much_is_missing() -> None:
    shown = shown_sample(
        trajectory((UNSAMPLED, 10), (5, 1000), (6, 1500)), letters, replica="r", time_s=1.0
    )
    assert [span[:2] for span in shown.spans] == [(-1, 10), (5, 1000), (6, 990)]
    assert shown.num_left_out == 510


def test_the_many_tokens_of_a_picture_count_as_one() -> None:
    picture = replace(
        trajectory((UNSAMPLED, 3003), (5, 4)),
        token_ids=np.array([1] + [7] * 3000 + [2, 2] + [3, 3, 4, 5], np.int32),
        images=("/data/red.png",),
    )
    shown = shown_sample(picture, letters, replica="r", time_s=1.0)
    assert shown.spans == ((-1, 3, "bhc"), (5, 4, "ddef"))
    assert shown.num_left_out == 0
    assert shown.images == ("/data/red.png",)


def test_trajectories_recorded_after_a_disk_was_full_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rollout-0.bin"
    first, lost, last = (
        replace(trajectory((UNSAMPLED, 2), (5, 3)), sibling=sibling) for sibling in range(3)
    )
    append_trajectories(path, [encode_trajectory(first)])
    with (
        no_file_longer_than(path.stat().st_size + 20),
        pytest.raises(OSError, match="File too large"),
    ):
        append_trajectories(path, [encode_trajectory(lost)])
    append_trajectories(path, [encode_trajectory(last)])
    assert [read.sibling for read in read_trajectories(path)] == [0, 2]


def test_one_sample_is_shown_every_two_seconds_and_a_switched_one_first(tmp_path: Path) -> None:
    moments = iter([10.0, 11.9, 12.0])
    show = SampleShow(tmp_path / "samples", "rollout-0", letters, clock=lambda: next(moments))
    plain, switched = trajectory((5, 4)), trajectory((5, 2), (6, 2), reward=0.25)
    for _ in range(3):
        show.offer([plain, switched, plain])
    lines = (tmp_path / "samples" / "shown-rollout-0.jsonl").read_bytes().splitlines()
    shown = [parse_shown_sample(line) for line in lines]
    assert [sample.time_s for sample in shown if sample] == [10.0, 12.0]
    assert all(sample and sample.reward == 0.25 for sample in shown)
    assert parse_shown_sample(lines[0][:-5]) is None


def finished(*samples: SampleRef) -> GroupFinished:
    return GroupFinished(
        replica="rollout-0", group=GroupId("train", 0, 7), attempt=1, samples=samples
    )


def test_a_group_is_one_line_without_its_samples(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    good = [
        SampleRef(
            sibling=i, status="completed", num_tokens=4 + i, reward=float(i), oldest_version=3 - i,
            newest_version=3,
        )
        for i in range(2)
    ]  # fmt: skip
    bad = SampleRef(sibling=2, status="failed", failure="the reward raised")
    log.note(time_s=5.0, epoch=2, events=[Tick(), finished(*good, bad)], dispatches=[])
    log.note(time_s=6.0, epoch=2, events=[Progress(replica="a", count=1)], dispatches=[])
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event["group"] == "train.0.7"
    assert (event["num_samples"], event["num_failed"], event["num_tokens"]) == (2, 1, 9)
    assert (event["reward"], event["oldest_version"], event["newest_version"]) == (0.5, 2, 3)
    assert tell_event(event) == (
        "finished group train.0.7: 2 samples, 9 tokens, versions 2 to 3, 1 failed"
    )


def test_a_group_of_failures_alone_is_told_too(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    failed = GroupFailed(
        replica="rollout-0", group=GroupId("train", 0, 8), attempt=0, reason="out of memory"
    )
    log.note(
        time_s=5.0,
        epoch=1,
        events=[finished(SampleRef(sibling=0, status="failed")), failed],
        dispatches=[],
    )
    none_left, told = read_events(tmp_path / "events.jsonl")
    assert none_left["reward"] is None
    assert tell_event(told) == "failed on group train.0.8: out of memory"


def test_a_long_log_is_bounded_and_keeps_the_newest_events(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, most_bytes=1600)
    for number in range(20):
        log.note(time_s=float(number), epoch=1, events=[finished()], dispatches=[])
        assert sum(part.stat().st_size for part in tmp_path.iterdir()) <= 1600
    assert log.problem == ""
    kept = [event["time_s"] for event in read_events(path)]
    assert kept == [float(number) for number in range(20 - len(kept), 20)]
    assert len(kept) >= 4


def test_a_full_disk_tears_no_line_and_what_happens_later_is_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.note(time_s=0.0, epoch=1, events=[finished()], dispatches=[])
    with no_file_longer_than(path.stat().st_size + 50):
        log.note(time_s=1.0, epoch=1, events=[finished()], dispatches=[])
        assert "cannot be written" in log.problem
    log.note(time_s=2.0, epoch=1, events=[finished()], dispatches=[])
    assert log.problem == ""
    assert [event["time_s"] for event in read_events(path)] == [0.0, 2.0]
    assert path.read_bytes().count(b"\n") == 2


def test_an_event_after_a_torn_one_is_not_lost_with_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.note(time_s=0.0, epoch=1, events=[finished()], dispatches=[])
    log.note(time_s=1.0, epoch=1, events=[finished()], dispatches=[])
    path.write_bytes(path.read_bytes()[:-9])  # the machine lost its power inside a write
    log.note(time_s=2.0, epoch=2, events=[finished()], dispatches=[])
    assert [event["time_s"] for event in read_events(path)] == [0.0, 2.0]
    assert path.read_bytes().count(b"\n") == 2


def test_lines_of_a_long_file_go_in_the_order_they_came(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for number in range(10):
        append_bounded(path, b"%d\n" % number, most_bytes=12)
    assert (before_of(path).read_bytes(), path.read_bytes()) == (b"6\n7\n8\n", b"9\n")


def test_a_log_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "missing" / "events.jsonl")
    log.note(time_s=5.0, epoch=1, events=[finished()], dispatches=[])
    assert "cannot be written" in log.problem


@pytest.mark.parametrize("event", [{"type": "GroupFinished"}, {"type": "OfAnotherVersion"}])
def test_a_record_of_another_version_is_told_by_its_type(event: dict[str, str]) -> None:
    assert tell_event(event).startswith(event["type"])


def test_steps_are_told_from_one_on_as_the_console_counts_them() -> None:
    assert tell_event({"type": "StepFinished", "step": 0}) == "finished step 1"
    saved = {"type": "CheckpointSaved", "step": 49, "path": "checkpoints/step-00000049"}
    assert tell_event(saved) == "saved a checkpoint after step 50"
    assert tell_event({**saved, "step": -1, "path": ""}) == "has nothing to save"
    train = {"type": "Train", "step": 1, "num_groups": 2}
    assert tell_event(train) == "is to train step 2 on 2 groups"


def test_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    good = b'{"time_s": 1, "type": "Stop", "reason": "x"}\n'
    bad = (
        b'{"time_s": null, "type": "Stop"}\n{"time_s": "x", "type": "Stop"}\n'
        b'{"time_s": 1, "type": []}\n{"time_s": 1, "type": "Stop", "replica": 5}\n[]\n\xff\n{"time'
    )
    path.write_bytes(good + bad)
    assert [event["time_s"] for event in read_events(path)] == [1]
