"""Processes that hang, as a controller tells of them: who is named, killed or spared."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from supervised import child, ignore

from cosmos_app.hung import HungProcesses
from cosmos_app.patience import patience_s
from cosmos_app.recipe import Recipe
from cosmos_app.supervisor import Supervisor
from cosmos_core.config import load_config


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    """Have processes that wait under the names of a controller and a rollout."""
    kept = Supervisor(ignore)
    for name in ("controller", "rollout-0"):
        kept.start(child(tmp_path, name))
    while kept.pid("controller") is None or kept.pid("rollout-0") is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    yield kept
    await kept.stop(grace_s=5.0)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, 120.0),
        ({"launch": {"hung_s": 5.0}}, 10.0),  # a reward may take so long
        ({"launch": {"hung_s": 5.0}, "reward": {"timeout_s": 300.0}}, 300.0),
        (
            {
                "launch": {"hung_s": 5.0},
                "rollout": {"environment": {"kind": "python", "function": "m:f"}},
            },
            60.0,
        ),
        (
            {"staleness": {"depth": 0, "bound": 0}, "rollout": {"colocate": "keep"}},
            3600.0,
        ),
        ({"model": {"training": {"compile": "inductor"}}}, 900.0),
    ],
)
def test_who_waits_for_what_has_a_deadline_of_its_own_is_given_the_time(
    chosen: dict[str, Any], expected: float
) -> None:
    assert patience_s(load_config(Recipe, chosen)) == expected


async def begun_again(supervisor: Supervisor, name: str, pid: int | None) -> None:
    async with asyncio.timeout(30.0):
        while supervisor.pid(name) in (None, pid):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_replica_is_named_once_and_killed_when_its_time_is_over(
    supervisor: Supervisor,
) -> None:
    said: list[str] = []
    hung = HungProcesses(supervisor, 5.0, said.append)
    pids = {name: supervisor.pid(name) for name in ("controller", "rollout-0")}
    begun = time.time()
    for for_s in (1.0, 2.0, 4.9):
        hung.look({"time_s": begun + for_s + 1.0, "silent": {"rollout-0": for_s, "far-1": for_s}})
    assert [text.partition(";")[0] for text in said] == [
        "[yellow]far-1 hangs: it has lost its lease, bus.lease_s without progress[/]",
        "[yellow]rollout-0 hangs: it has lost its lease, bus.lease_s without progress",
    ]
    hung.look({"time_s": begun + 5.0, "silent": {}})
    hung.look({"time_s": begun + 6.0, "silent": {"rollout-0": 0.0}})
    assert len(said) == 3, "it went on, and hangs again"
    assert supervisor.pid("rollout-0") == pids["rollout-0"]
    hung.look({"time_s": begun + 12.0, "silent": {"rollout-0": 6.0}})
    await begun_again(supervisor, "rollout-0", pids["rollout-0"])
    hung.look({"time_s": begun + 13.0, "silent": {"rollout-0": 13.0}})
    (incident,) = supervisor.incidents
    assert (incident.name, incident.how) == ("rollout-0", "signal 9 (SIGKILL), as it hung")
    assert supervisor.pid("controller") == pids["controller"]


async def test_a_controller_that_says_nothing_any_more_is_begun_anew(
    supervisor: Supervisor,
) -> None:
    said: list[str] = []
    hung = HungProcesses(supervisor, 600.0, said.append, controller_s=2.0)
    pid = supervisor.pid("controller")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    hung.look({"time_s": 1.0})
    assert not hung.is_mute
    await asyncio.sleep(2.1)
    for _ in range(2):
        hung.look({"time_s": 1.0})
    assert hung.is_mute
    hung.end_controller()
    assert said == ["[yellow]no controller has said anything for 2 s[/]"]
    await begun_again(supervisor, "controller", pid)
    (incident,) = supervisor.incidents
    assert (incident.name, incident.how) == ("controller", "signal 9 (SIGKILL), as it hung")
    for _ in range(2):
        hung.look({"time_s": 1.0})
    assert hung.is_mute
    hung.end_controller()
    assert len(supervisor.incidents) == 1, "one that has just begun is spared"
    hung.look({"time_s": 2.0})
    assert not hung.is_mute


async def test_a_controller_that_never_says_a_word_is_begun_anew_too(
    supervisor: Supervisor,
) -> None:
    said: list[str] = []
    limits = {"controller_s": 1.0, "first_word_s": 3.0}
    hung = HungProcesses(supervisor, 600.0, said.append, **limits)
    pid = supervisor.pid("controller")
    await asyncio.sleep(3.1)
    for _ in range(2):
        hung.look({})
    assert not hung.is_mute, "it has longer to begin"
    hung.look({})
    assert hung.is_mute
    hung.end_controller()
    assert said == ["[yellow]no controller has said anything for 3 s[/]"]
    await begun_again(supervisor, "controller", pid)


async def test_one_that_stands_by_and_says_so_no_more_is_begun_anew(
    supervisor: Supervisor,
) -> None:
    said: list[str] = []
    hung = HungProcesses(supervisor, 600.0, said.append, controller_s=2.0)
    pid = supervisor.pid("controller")
    waits = {"controller": 5.0, "rollout-0": 1.0, "standby-9": 1.0}
    for said_s in (1.0, 2.0, 3.0, 4.0):
        assert not hung.look_at_standbys("rollout-0", {**waits, "controller": said_s})
    assert [hung.look_at_standbys("rollout-0", waits) for _ in range(3)] == [
        [],  # it said something new
        [],
        ["controller"],  # not who has the lease, nor who runs elsewhere
    ]
    await asyncio.sleep(2.1)
    hung.end_standbys(["controller"])
    assert said == ["[yellow]controller, which stands by, says nothing[/]"]
    await begun_again(supervisor, "controller", pid)
    assert hung.look_at_standbys("rollout-0", waits) == []


async def test_one_that_had_the_lease_and_says_nothing_since_is_begun_anew(
    supervisor: Supervisor,
) -> None:
    """It has never stood by; another took over, and the run may even be over by now."""
    said: list[str] = []
    hung = HungProcesses(supervisor, 600.0, said.append, controller_s=2.0)
    pid = supervisor.pid("rollout-0")
    assert not any(hung.look_at_standbys("rollout-0", {}) for _ in range(5)), "it has the lease"
    os.kill(pid or 0, signal.SIGSTOP)
    assert [hung.look_at_standbys("", {}) for _ in range(2)] == [[], ["rollout-0"]]
    await asyncio.sleep(2.1)
    hung.end_standbys(["rollout-0"])
    assert said == ["[yellow]rollout-0, which stands by, says nothing[/]"]
    await begun_again(supervisor, "rollout-0", pid)
