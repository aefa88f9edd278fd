"""A policy and two rollouts that speak through the bus and answer at once.

The policy checks what a real one relies on: each step once, in order, all of its payloads there.
"""

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from cosmos_core.bus import Bus, HostConfig
from cosmos_core.config import config_to_json
from cosmos_core.control import (
    ALL_DONE,
    ControllerConfig,
    StalenessConfig,
    ValidationPlan,
    payload_key,
)
from cosmos_core.messages import (
    CheckpointSaved,
    Generate,
    GroupFinished,
    LoadVersion,
    Progress,
    ReplicaJoined,
    SampleRef,
    StepFinished,
    Stop,
    Train,
    VersionLoaded,
    VersionPublished,
)

NUM_STEPS = 12
CONFIG = ControllerConfig(
    num_steps=NUM_STEPS,
    groups_per_step=4,
    samples_per_group=2,
    staleness=StalenessConfig(depth=1, bound=2),
    validation=ValidationPlan(num_prompts=6),
    checkpoint_every=3,
    lease_s=4.0,
    first_lease_s=8.0,
)
HOST = HostConfig(lease_s=0.8, tick_s=0.05, snapshot_every=7)

HOST_PROCESS = """
import asyncio, sys
from cosmos_core.bus import Bus, ControllerHost, HostConfig
from cosmos_core.config import config_from_json
from cosmos_core.control import ControllerConfig

async def main():
    config = config_from_json(ControllerConfig, sys.argv[3])
    host = HostConfig(lease_s=0.8, tick_s=0.05, snapshot_every=int(sys.argv[4]))
    async with await Bus.connect(sys.argv[1], sys.argv[2]) as bus:
        await ControllerHost(bus, config, host=host).run()

asyncio.run(main())
"""


@dataclass
class World:
    """Replicas as tasks, and what they saw."""

    bus: Bus
    pause_s: float = 0.0
    trained: list[Train] = field(default_factory=list)
    cuts: dict[int, bytes] = field(default_factory=dict)
    version: int = 0

    async def pulse(self, channel: Any) -> None:
        while True:
            await channel.send(Progress(replica=channel.replica, count=0))
            await asyncio.sleep(0.5)

    @asynccontextmanager
    async def joined(self, joined: ReplicaJoined) -> AsyncIterator[Any]:
        async with self.bus.join(joined) as channel:
            pulse = asyncio.create_task(self.pulse(channel))
            try:
                yield channel
            finally:
                pulse.cancel()

    async def rollout(self, name: str) -> None:
        version = 0
        async with self.joined(ReplicaJoined(replica=name, role="rollout", slots=4)) as channel:
            async for command in channel.commands():
                match command:
                    case Generate():
                        await asyncio.sleep(random.uniform(0, self.pause_s))
                        await channel.send(await self.sample(name, command, version))
                    case LoadVersion():
                        version = command.version
                        loaded = VersionLoaded(
                            replica=name,
                            version=version,
                            transfer_s=0.0,
                            stall_s=0.0,
                            lineage=command.lineage,
                        )
                        await channel.send(loaded)
                    case Stop():
                        return
                    case _:
                        pass

    async def sample(self, name: str, command: Generate, version: int) -> GroupFinished:
        refs = tuple(
            SampleRef(
                sibling=sibling,
                status="completed",
                key=payload_key(command.group, command.attempt, sibling),
                num_tokens=3,
                reward=float(sibling),
                oldest_version=version,
                newest_version=version,
            )
            for sibling in range(command.num_samples)
        )
        await self.bus.put_payloads({ref.key: ref.key.encode() for ref in refs})
        return GroupFinished(
            replica=name, group=command.group, attempt=command.attempt, samples=refs
        )

    async def policy(self, name: str = "policy-0") -> None:
        joined = ReplicaJoined(
            replica=name, role="policy", version=self.version, endpoints=("here",)
        )
        async with self.joined(joined) as channel:
            async for command in channel.commands():
                match command:
                    case Train():
                        await self.train(command)
                        await channel.send(StepFinished(replica=name, step=command.step))
                        published = VersionPublished(
                            replica=name, version=command.step + 1, stall_s=0.25
                        )
                        await channel.send(published)
                    case Stop():
                        self.cuts[self.version] = command.cut
                        saved = CheckpointSaved(replica=name, step=self.version - 1, path="x")
                        await channel.send(saved)
                        await until(self.has_ended)  # the last status tells of it, too
                        return
                    case _:
                        pass

    async def train(self, command: Train) -> None:
        assert command.step == self.version, "a step is trained twice or left out"
        keys = [sample.key for group in command.groups for sample in group]
        assert await self.bus.get_payloads(keys) == [key.encode() for key in keys]
        staleness = [command.step - sample.oldest_version for g in command.groups for sample in g]
        assert min(staleness) >= 0
        assert max(staleness) <= CONFIG.staleness.bound
        self.trained.append(command)
        self.version += 1
        await asyncio.sleep(self.pause_s)

    async def has_trained(self, num_steps: int) -> bool:
        return len(self.trained) >= num_steps

    async def has_ended(self) -> bool:
        return bool((await self.bus.read_status()).get("finished"))

    async def has_controller(self, epoch: int) -> bool:
        return (await self.bus.read_status()).get("epoch", 0) >= epoch

    async def assert_complete(self) -> None:
        status = await self.bus.read_status()
        assert status["finished"] == ALL_DONE
        assert [train.step for train in self.trained] == list(range(NUM_STEPS))
        keys = [s.key for train in self.trained for group in train.groups for s in group]
        assert len(set(keys)) == len(keys) == NUM_STEPS * 4 * 2
        books = status["books"]
        assert books["consumed"] == NUM_STEPS * 4
        assert books["issued"] == books["consumed"] + sum(books["in_flight"].values())
        assert set(status["validations"]) == {"0", str(NUM_STEPS)}


async def until(is_true: Callable[[], Awaitable[bool]]) -> None:
    while not await is_true():  # noqa: ASYNC110 - of another process, or far away
        await asyncio.sleep(0.02)


async def run_world(world: World, *tasks: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(150), asyncio.TaskGroup() as group:
        group.create_task(world.policy())
        for index in range(2):
            group.create_task(world.rollout(f"rollout-{index}"))
        for task in tasks:
            group.create_task(task())


def spawn_host(
    url: str, namespace: str, config: ControllerConfig, *, snapshot_every: int = 7
) -> subprocess.Popen[bytes]:
    """Start a controller's process, a session of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = (url, namespace, config_to_json(config), str(snapshot_every))
    return subprocess.Popen(
        [sys.executable, "-c", HOST_PROCESS, *words],
        env=environment,
        start_new_session=True,
    )
