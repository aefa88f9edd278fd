"""Children that are suspended are killed and started again, unless they go on."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from processes import descendants, is_alive, is_stopped
from supervised import SLEEPING, child, ignore

from cosmos_app.supervisor import Supervisor
from cosmos_app.suspended import SuspendedProcesses

# The child of a child, as ranks are of torchrun.
_PAIR = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPING!r}])"


async def until(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("the condition never held")


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncGenerator[Supervisor]:
    """Give the supervisor of a child, "pair", that has one of its own."""
    supervisor = Supervisor(ignore)
    supervisor.start(child(tmp_path, "pair", _PAIR))
    await until(lambda: children_of(supervisor))
    yield supervisor
    await supervisor.stop(1.0)


def children_of(supervisor: Supervisor) -> list[int]:
    pid = supervisor.pid("pair")
    return list(descendants(pid)) if pid is not None else []


@pytest.mark.parametrize("which", ["itself", "its child"])
async def test_who_is_suspended_for_too_long_is_killed_and_started_again(pair, which):
    said: list[str] = []
    suspended = SuspendedProcesses(pair, 3.0, said.append)
    first = pair.pid("pair")
    victim = first if which == "itself" else children_of(pair)[0]
    suspended.look()
    os.kill(victim, signal.SIGSTOP)
    await until(lambda: is_stopped(victim))
    for _ in range(2):
        suspended.look()
    assert is_alive(victim)
    suspended.look()
    await until(lambda: pair.pid("pair") not in {None, first})
    assert not is_alive(victim)
    assert [(i.name, i.how, i.outcome) for i in pair.incidents] == [
        ("pair", "signal 9 (SIGKILL), as it hung", "restarted")
    ]
    assert said == ["[yellow]pair is suspended, for 3 s: it is killed[/]"]


async def test_who_goes_on_is_left_alone_and_so_are_others(pair):
    suspended = SuspendedProcesses(pair, 3.0, pytest.fail)
    own = pair.pid("pair")
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SLEEPING, start_new_session=True
    )
    other.send_signal(signal.SIGSTOP)
    for _ in range(3):
        os.kill(own, signal.SIGSTOP)
        await until(lambda: is_stopped(own))
        suspended.look()
        suspended.look()
        os.kill(own, signal.SIGCONT)
        await until(lambda: not is_stopped(own))
        suspended.look()
    assert pair.pid("pair") == own
    assert other.returncode is None
    other.kill()
    await other.wait()
