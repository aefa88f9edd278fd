"""What a launcher and who trains do while a disk is full: wait, tell, go on."""

import errno
from collections.abc import Mapping
from pathlib import Path

import pytest
from full_disks import no_file_longer_than

from cosmos_app.full_disk import Writer
from cosmos_app.unsaved import FAILED, Saves, UnsavedWarning
from cosmos_app.wfm.figures import keep_before
from cosmos_core.metrics import MetricRecord
from cosmos_parallel import CheckpointWriteError


class Disk:
    """Takes what is written after so many tries in vain."""

    def __init__(self, refusals: int, number: int = errno.ENOSPC) -> None:
        self.refusals = refusals
        self.number = number
        self.num_written = 0

    def write(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise OSError(self.number, "No room")
        self.num_written += 1

    async def save(self) -> str:
        try:
            self.write()
        except OSError as error:
            raise CheckpointWriteError("checkpoint step-00000004 not written") from error
        return "step-00000004"


class Reports:
    """What was reported."""

    def __init__(self) -> None:
        self.values = list[float]()

    async def __call__(self, values: Mapping[str, float]) -> None:
        self.values.append(values[FAILED])


async def test_metrics_are_written_when_there_is_room_again_and_both_are_told_once() -> None:
    told = list[str]()
    disk = Disk(refusals=3)
    writer = Writer(Path("/runs/one"), told.append, pause_s=0.0)
    await writer.write(disk.write)
    await writer.write(disk.write)
    assert disk.num_written == 2
    assert told == [
        "[yellow]/runs/one: No room; metrics wait for room there, free some[/]",
        "there is room again: metrics are written",
    ]


async def test_another_error_is_not_waited_for() -> None:
    with pytest.raises(OSError, match="No room"):
        await Writer(Path("/runs/one"), print).write(Disk(1, errno.EIO).write)


async def test_a_run_goes_on_without_a_checkpoint_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reports, disk, saves = Reports(), Disk(refusals=1), Saves()
    assert await saves.in_passing(disk.save, reports) is None
    assert "step-00000004 not written" in capsys.readouterr().err
    for _ in range(2):
        assert await saves.in_passing(disk.save, reports) == "step-00000004"
    assert reports.values == [1.0, 0.0]


async def test_the_last_checkpoint_is_tried_again_and_then_an_error() -> None:
    reports, saves = Reports(), Saves(pause_s=0.0)
    assert await saves.at_last(Disk(refusals=3).save, reports) == "step-00000004"
    assert reports.values == [1.0, 1.0, 1.0, 0.0]
    with pytest.raises(CheckpointWriteError, match="not written"):
        await saves.at_last(Disk(refusals=400).save, Reports())


async def test_while_all_is_well_nothing_is_reported() -> None:
    async def save() -> str:
        return ""

    reports, saves = Reports(), Saves()
    assert await saves.in_passing(save, reports) == ""
    assert await saves.in_passing(Disk(refusals=0).save, reports) == "step-00000004"
    assert reports.values == []


def test_who_started_a_run_hears_once_of_checkpoints_that_fail_and_of_the_next_good_one() -> None:
    told = list[str]()
    warning = UnsavedWarning(told.append)
    for step, failed in enumerate((0.0, 1.0, 1.0, 0.0, 0.0)):
        warning.look(MetricRecord(0.0, "policy", "policy-0", step, {FAILED: failed}))
        warning.look(MetricRecord(0.0, "policy", "policy-0", step, {"loss": 0.5}))
    begun, ended = told
    assert begun.startswith("[yellow]policy-0 cannot write the checkpoint after step 2; the one")
    assert ended == "policy-0 wrote the checkpoint after step 4"


def test_figures_of_a_world_model_stay_where_the_disk_is_full_as_it_goes_on(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = "".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in range(1, 9))
    metrics.write_text(rows)
    with no_file_longer_than(50), pytest.raises(OSError, match="large"):
        keep_before(metrics, 8, again=["loss"])
    assert metrics.read_text() == rows
    keep_before(metrics, 8, again=["loss"])
    assert metrics.read_text() == "".join(rows.splitlines(keepends=True)[:7])
