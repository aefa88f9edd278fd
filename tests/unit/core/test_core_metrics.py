"""Metric records and the sinks: what is written is what every reader finds."""

import errno
import importlib.util
import io
import json
import math
import time
from pathlib import Path

import pytest
from full_disks import no_file_longer_than
from rich.console import Console
from sinks_read import wandb_history

from cosmos_core.metrics import (
    ConsoleSinkConfig,
    FanOut,
    JsonlSink,
    JsonlSinkConfig,
    MetricRecord,
    MetricsFormatError,
    SinkContext,
    TensorBoardSinkConfig,
    WandbSinkConfig,
    open_sinks,
    read_metrics,
)
from cosmos_core.metrics.console import ConsoleSink, format_figure
from cosmos_core.rundir import RunDirectory, cut_torn_line


def controller(step: int, time_s: float = 0.0, **values: float) -> MetricRecord:
    return MetricRecord(time_s, "controller", "controller", step, values)


def rollout(number: int, **values: float) -> MetricRecord:
    return MetricRecord(0.0, "rollout", f"rollout-{number}", 0, values)


@pytest.fixture
def context(tmp_path: Path):
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        console = Console(file=io.StringIO(), width=100)
        yield SinkContext(run=run, num_steps=4, console=console, config={"seed": 3})


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# JSON lines


def test_lines_read_back_equal_numbers_that_json_cannot_say_included(tmp_path: Path):
    records = [
        controller(0, 1.5, loss=-0.25, count=3),
        rollout(1, high=math.inf, low=-math.inf),
        MetricRecord(1e9 + 0.125, "policy", "policy-0", 7, {}),
    ]
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for record in [*records, rollout(2, broken=math.nan)]:
        sink.write(record)
    *same, broken = read_metrics(tmp_path / "metrics.jsonl")  # visible before close
    sink.close()
    sink.close()
    assert same == records
    assert math.isnan(broken.values["broken"])


def test_every_line_is_json_by_the_standard(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(rollout(1, broken=math.nan))
    sink.close()

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["values"] == {"broken": "NaN"}


def test_a_torn_last_line_is_passed_over_and_cut_off_before_more_is_written(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(controller(0))
    sink.write(controller(1))
    sink.close()
    path.write_bytes(path.read_bytes()[:-9])  # the process was killed inside a write
    assert read_metrics(path) == [controller(0)]
    sink = JsonlSink(path)
    sink.write(controller(2))
    sink.close()
    assert read_metrics(path) == [controller(0), controller(2)]


@pytest.mark.parametrize("whole", [b"", b"{}\n", b"{}\n" * 50_000])
@pytest.mark.parametrize("torn", [b"", b"{", b"x" * 200_000])
def test_a_torn_line_of_any_length_is_cut_off_and_nothing_else(
    tmp_path: Path, whole: bytes, torn: bytes
):
    path = tmp_path / "lines"
    path.write_bytes(whole + torn)
    with path.open("a+b", buffering=0) as file:
        cut_torn_line(file)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "line",
    ["{}", "not json", "[]", '{"time_s":0,"role":"p","replica":"p","step":0,"values":{"x":"y"}}'],
)
def test_a_damaged_line_inside_the_file_is_named(tmp_path: Path, line: str):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(controller(0))
    sink.close()
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(MetricsFormatError, match=r"metrics\.jsonl:2: not a metric record"):
        read_metrics(path)


# Console


def test_without_a_terminal_each_step_is_one_plain_line(context: SinkContext):
    sink = ConsoleSinkConfig().build(context)
    sink.write(rollout(0, idle_share=0.02))
    sink.write(rollout(1, idle_share=0.06))
    sink.write(controller(0, 10.0, reward=0.25, staleness=1.5))
    sink.write(controller(1, 40.0, reward=0.5, staleness=1.0))
    sink.write(controller(1, 41.0, reward=0.5))  # a second record of a step is no second step
    sink.write(controller(3, 100.0))
    sink.close()
    assert text_of(context.console).splitlines() == [
        "step 1/4  reward 0.25  staleness 1.5  rollout idle 4%",
        "step 2/4  reward 0.5  staleness 1  rollout idle 4%  1:00 left",
        "step 4/4  reward 0.5  staleness 1  rollout idle 4%",
    ]


def test_lines_may_be_fewer_but_the_last_step_is_always_told(context: SinkContext):
    sink = ConsoleSinkConfig(every=3, show=()).build(context)
    for step in range(4):
        sink.write(controller(step, 5.0 * step))
    assert text_of(context.console).splitlines() == ["step 3/4  0:05 left", "step 4/4"]


def test_on_a_terminal_a_bar_moves_and_other_text_stays_above_it():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    sink = ConsoleSink(console, num_steps=4, show=("controller/reward",), every=1)
    sink.write(controller(0, 10.0, reward=0.25))
    console.print("a rollout replica joined")
    sink.write(controller(1, 3610.0, reward=0.5))
    sink.close()
    sink.close()
    drawn = text_of(console)
    assert "a rollout replica joined" in drawn
    last = drawn[drawn.rindex("step ") :]
    assert "2/4" in last
    assert "50%  2:00:00 left" in last
    assert "reward 0.5" in last
    assert "━" in last


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("policy/idle_share", {"a": 0.1, "b": 0.2}, "policy idle 15%"),
        ("rollout/stall_s", {"a": 0.0123}, "rollout stall 0.0123 s"),
        ("controller/reward/exact", {"a": 1 / 3}, "reward exact 0.333"),
        ("policy/loss", {"a": -1e-5}, "loss -1e-05"),
    ],
)
def test_figures_carry_their_units(name: str, values: dict[str, float], text: str):
    assert format_figure(name, values) == text


# TensorBoard, W&B


def test_tensorboard_finds_every_point_at_its_step_and_time(context: SinkContext):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSinkConfig().build(context)
    sink.write(MetricRecord(100.0, "policy", "policy-0", 0, {"loss": 0.5, "grad_norm": 2.0}))
    sink.write(MetricRecord(101.0, "policy", "policy-0", 1, {"loss": 0.25}))
    sink.write(MetricRecord(102.0, "policy", "policy-1", 1, {"loss": 8.0}))
    sink.close()
    sink.close()
    found = {}
    for replica in ("policy-0", "policy-1"):
        events = EventAccumulator(str(context.run.path / "tensorboard" / replica))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            points = [(point.wall_time, point.step, point.value) for point in events.Scalars(tag)]
            found[replica, tag] = points
    assert found == {
        ("policy-0", "policy/loss"): [(100.0, 0, 0.5), (101.0, 1, 0.25)],
        ("policy-0", "policy/grad_norm"): [(100.0, 0, 2.0)],
        ("policy-1", "policy/loss"): [(102.0, 1, 8.0)],
    }


def test_wandb_keeps_the_run_offline_in_the_run_directory(context: SinkContext):
    pytest.importorskip("wandb")
    sink = WandbSinkConfig().build(context)
    sink.write(MetricRecord(100.0, "policy", "policy-0", 3, {"loss": 0.5}))
    sink.write(MetricRecord(101.0, "rollout", "rollout-0", 1, {"idle_share": 0.125}))
    sink.close()
    sink.close()
    (file,) = (context.run.path / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 60  # wandb's own process may write on when `close` has returned
    while len(wandb_history(file)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    ours = [
        {name: value for name, value in row.items() if not name.startswith("_")}
        for row in wandb_history(file)
    ]
    assert ours == [
        {"policy-0/step": 3, "policy-0/loss": 0.5},
        {"rollout-0/step": 1, "rollout-0/idle_share": 0.125},
    ]


# All together


def test_a_disk_that_is_full_tears_no_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(controller(0, loss=0.5))
    with no_file_longer_than(path.stat().st_size + 10), pytest.raises(OSError, match="too large"):
        sink.write(controller(1, loss=0.5))
    sink.write(controller(2, loss=0.5))
    sink.close()
    assert read_metrics(path) == [controller(0, loss=0.5), controller(2, loss=0.5)]


class _Refusing:
    """Takes no record while it is full."""

    def __init__(self) -> None:
        self.is_full = False
        self.taken = list[int]()

    def write(self, record: MetricRecord) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.taken.append(record.step)

    def close(self) -> None: ...


def test_a_record_that_is_written_again_goes_to_those_that_have_not_taken_it():
    first, full, last = _Refusing(), _Refusing(), _Refusing()
    sinks, again = FanOut([first, full, last]), controller(1, loss=0.5)
    sinks.write(controller(0, loss=0.5))
    full.is_full = True
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            sinks.write(again)
    full.is_full = False
    sinks.write(again)
    sinks.write(controller(2, loss=0.5))
    assert first.taken == full.taken == last.taken == [0, 1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_goes_on_when_the_disk_has_room_again(context: SinkContext):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSinkConfig(flush_s=1).build(context)
    folder = context.run.path / "tensorboard" / "controller"
    sink.write(controller(0, loss=0.5))

    def write_for_long() -> None:  # in a thread of its own, which fails some time later
        for _ in range(100_000):
            sink.write(controller(1, loss=0.5))

    with no_file_longer_than(8192), pytest.raises(OSError, match="too large"):
        write_for_long()
    sink.write(controller(2, loss=0.5))
    sink.close()
    points = EventAccumulator(str(folder))
    points.Reload()
    assert points.Scalars("controller/loss")[-1].step == 2


def test_all_sinks_open_together_and_each_gets_every_record(context: SinkContext):
    configs = [ConsoleSinkConfig(), JsonlSinkConfig()]
    if importlib.util.find_spec("tensorboard"):
        configs.append(TensorBoardSinkConfig())
    sinks = open_sinks(configs, context)
    sinks.write(controller(0, reward=1.0))
    sinks.close()
    assert text_of(context.console) == "step 1/4  reward 1\n"
    assert read_metrics(context.run.metrics) == [controller(0, reward=1.0)]


class _Sink:
    """Remembers whether it was closed; fails to close if told so."""

    def __init__(self, *, fails: bool = False) -> None:
        self.closed = False
        self._fails = fails

    def write(self, record: MetricRecord) -> None:
        raise AssertionError("nothing is written here")

    def close(self) -> None:
        self.closed = True
        if self._fails:
            raise OSError("disk full")


def test_a_sink_that_fails_to_close_does_not_keep_the_others_open():
    sinks = [_Sink(), _Sink(fails=True), _Sink()]
    with pytest.raises(OSError, match="disk full"):
        FanOut(sinks).close()
    assert [sink.closed for sink in sinks] == [True, True, True]
