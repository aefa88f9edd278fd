"""The dashboard of a long run: many replicas that came and went, many megabytes to read."""

import json
import os
from pathlib import Path

import pytest

from cosmos_app.dashboard.example import write_example_run
from cosmos_app.dashboard.feed import RunFeed
from cosmos_app.dashboard.history import History
from cosmos_app.dashboard.prometheus import exposition
from cosmos_app.dashboard.view import run_view, timeline_view
from cosmos_core.metrics import MetricRecord
from cosmos_core.rundir import RunDirectory


def test_a_thousand_replicas_do_not_fill_the_memory() -> None:
    history = History()
    values = {"decoding_share": 1.0, "tokens_per_s": 1.0, "stall_s": 0.1, "transfer_s": 0.1}
    for moment in range(10):
        history.take(
            MetricRecord(moment + 1.0, "rollout", f"rollout-{index}", 0, values)
            for index in range(1000)
        )
    assert len(history.lanes) == 64
    assert len(history.latest) == 128


def test_replicas_that_are_gone_make_room_for_those_that_come() -> None:
    history = History()
    values = {"decoding_share": 1.0, "tokens_per_s": 1.0, "stall_s": 0.1, "transfer_s": 0.1}
    for number in range(1000):
        record = MetricRecord(60.0 * number, "rollout", f"rollout-{number}", 0, values)
        policy = MetricRecord(60.0 * number, "policy", "policy-0", number, {"train_s": 50.0})
        history.take([record, policy])
    for kept, most in ((history.lanes, 64), (history.latest, 128), (history.num_stalls, 128)):
        assert len(kept) <= most
        assert "rollout-999" in kept
        assert "rollout-0" not in kept
    assert "policy-0" in history.lanes


async def test_a_timeline_leaves_out_rollouts_that_are_gone(tmp_path: Path) -> None:
    write_example_run(tmp_path / "run")
    feed = RunFeed(RunDirectory.open(tmp_path / "run"))
    await feed.look()
    shown = {lane.name for lane in timeline_view(feed, 60.0)}
    values = {"decoding_share": 1.0, "tokens_per_s": 1.0}
    old = MetricRecord(feed.history.last_s - 61.0, "rollout", "rollout-77", 0, values)
    feed.history.take([old])
    assert {lane.name for lane in timeline_view(feed, 60.0)} == shown
    assert {lane.name for lane in timeline_view(feed, 62.0)} >= {"rollout-77"}


async def test_a_long_run_is_read_without_pauses(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        line = b'{"time_s":1.0,"role":"x","replica":"x","step":0,"values":{"loss":0.5}}\n'
        run.metrics.write_bytes(line)
        feed = RunFeed(run)
        assert not await feed.look()
        run.metrics.write_bytes(line * ((9 << 20) // len(line)))
        assert await feed.look()  # eight pieces of a MiB at once, that others get their turn


@pytest.mark.parametrize(("steps", "state", "shown"), [(10, "silent", 30), (30, "finished", 30)])
async def test_the_report_of_an_earlier_start_says_nothing_of_a_run_that_has_gone_on(
    tmp_path: Path, steps: int, state: str, shown: int
) -> None:
    """The other one is a copy, whose files were made in another order."""
    write_example_run(tmp_path / "run")
    run = RunDirectory.open(tmp_path / "run")
    report = json.loads(run.report.read_text())
    run.report.write_text(json.dumps({**report, "finished": "ctrl-c", "steps": steps}))
    started_s = run.report.stat().st_mtime + 5.0
    (run.path / "namespace").write_text("the second")
    os.utime(run.path / "namespace", (started_s, started_s))
    feed = RunFeed(run)
    for _ in range(2):
        await feed.look()
        view = run_view(feed, started_s)
        assert (view.state, view.step) == (state, shown)
        assert ("ctrl-c" in view.message) == (state == "finished")
    run.report.write_text(json.dumps({**report, "finished": "all steps done"}))
    os.utime(run.report, (started_s + 5.0, started_s + 5.0))
    feed = RunFeed(run)
    await feed.look()
    assert run_view(feed, started_s).message == "all steps done"


async def test_counters_of_prometheus_do_not_fall_with_a_policy_that_falls_back(
    tmp_path: Path,
) -> None:
    """It would take all that is counted after that for an increase."""
    write_example_run(tmp_path / "run")
    feed = RunFeed(RunDirectory.open(tmp_path / "run"))
    told = list[bytes]()
    for issued, consumed, stale in ((300, 240, 2), (300, 200, 2), (310, 230, 3)):
        books = {"issued": issued, "consumed": consumed, "dropped": {"too stale": stale}}
        feed.status = {"time_s": 0.0, "books": books}
        await feed.look()
        lines = exposition(feed, 0.0).splitlines()
        told += [line.split()[-1] for line in lines if line.startswith(b"cosmos_groups_")]
    assert told[:3] == [b"240.0", b"2.0", b"300.0"]
    assert told[3:6] == told[:3]
    assert told[6:] == [b"270.0", b"3.0", b"310.0"]


async def test_counters_that_are_not_known_yet_are_no_zeros_for_prometheus(tmp_path: Path) -> None:
    """It takes what comes after them for an increase within one interval."""
    write_example_run(tmp_path / "run")
    run = RunDirectory.open(tmp_path / "run")
    feed = RunFeed(run)
    await feed.look()
    assert b"\ncosmos_groups_issued_total " in exposition(feed, feed.history.last_s)
    run.report.unlink()
    feed = RunFeed(run)
    await feed.look()
    page = exposition(feed, feed.history.last_s)
    assert b"\ncosmos_step 30.0" in page
    assert b"\ncosmos_groups_issued_total" not in page
    assert b"\ncosmos_groups_ended_total" not in page
