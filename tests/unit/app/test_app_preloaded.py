"""Replicas that are forked from one process are what starting them would have made them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from processes import ends_soon, importing_from, is_alive, parent_of, title_of
from supervised import ignore

from cosmos_app.preloaded import Preloaded, PreloadLostError, Shared, preloading
from cosmos_app.supervisor import ChildSpec, Supervisor

# Imported by who forks; what is forked says at its end what it has become, and may stay a while.
_TELLING = """
import atexit, os, random, sys, tempfile, time
import numpy

def tell():
    print(random.random(), numpy.random.random())
    print(tempfile.gettempdir(), sys.argv[1:], os.environ["MARK"], sys.stdin.read() == "")
    if "STAYS" in os.environ:
        time.sleep(60)

atexit.register(tell)
"""
_LAUNCHER = """
import asyncio, os, sys
from pathlib import Path
from cosmos_app.preloaded import Preloaded, Shared

async def main():
    preloaded = Preloaded(Shared(modules=["cosmos_app.cli", "telling"]), {})
    environment = {**os.environ, "MARK": "1", "STAYS": "1"}
    forked = await preloaded.start(
        [sys.executable, "-m", "cosmos_app", "policy", "--help"], environment, Path(sys.argv[1])
    )
    print(preloaded._process.pid, forked.pid, flush=True)
    await forked.wait()

asyncio.run(main())
"""


def command(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "cosmos_app", *words)


def spec(folder: Path, *words: str, **environment: str) -> ChildSpec:
    return ChildSpec(
        name=words[-1],
        argv=command(*words),
        environment={"MARK": "-", **environment},
        log=folder / f"{words[-1]}.log",
        restarts=1,
    )


async def until(condition: Callable[[], Any]) -> Any:
    """Return what a condition returns when it holds."""
    for _ in range(3000):
        if found := condition():
            return found
        await asyncio.sleep(0.01)
    pytest.fail("the condition never held")


@pytest.fixture
def importable(tmp_path: Path) -> dict[str, str]:
    """Return the environment of who imports the module that tells."""
    (tmp_path / "telling.py").write_text(_TELLING)
    return importing_from(tmp_path)


@pytest.fixture
async def preloaded(importable: dict[str, str]) -> AsyncGenerator[Preloaded]:
    shared = Shared(modules=["cosmos_app.cli", "telling", "not.there", "os:none"])
    async with preloading([shared], importable) as (given,):
        yield given


async def test_nothing_is_forked_from_who_has_asked_for_gpus_in_vain(tmp_path: Path):
    pretending = (
        "import sys, torch; torch.cuda.is_available = lambda: True; sys.modules['fla'] = sys"
    )
    (tmp_path / "pretending.py").write_text(pretending)
    path = importing_from(tmp_path)
    said: list[str] = []
    async with preloading([Shared(modules=["pretending"])], path, said.append) as (given,):
        with pytest.raises(PreloadLostError):
            await given.start(command("policy", "--help"), {**os.environ}, tmp_path / "log")
    assert said == [
        "each replica starts by itself, which takes longer: fla asks for GPUs as it is imported"
    ]


async def test_what_is_forked_is_what_its_command_line_says(preloaded: Preloaded, tmp_path: Path):
    log = tmp_path / "one.log"
    log.write_text("an earlier attempt\n")
    environment = {**os.environ, "MARK": "its own", "TMPDIR": str(tmp_path), "HOME": "/"}
    forked = await preloaded.start(command("policy", "--help"), environment, log)
    assert await forked.wait() == forked.returncode == 0
    lines = log.read_text().splitlines()
    assert lines[0] == "an earlier attempt"
    assert "policy [OPTIONS]" in lines[1]
    assert lines[-1] == f"{tmp_path} ['policy', '--help'] its own True"


async def test_what_it_says_is_in_the_log_at_once_if_its_environment_wants_that(
    preloaded: Preloaded, tmp_path: Path
):
    log = tmp_path / "one.log"
    environment = {**os.environ, "MARK": "-", "STAYS": "yes", "PYTHONUNBUFFERED": "1"}
    forked = await preloaded.start(command("policy", "--help"), environment, log)
    await until(lambda: log.exists() and "['policy', '--help'] - True" in log.read_text())
    os.killpg(forked.pid, signal.SIGKILL)


async def test_several_begin_at_once_and_draw_other_numbers(preloaded: Preloaded, tmp_path: Path):
    names = ("policy", "rollout", "teacher")
    logs = {name: tmp_path / f"{name}.log" for name in names}
    environment = {**os.environ, "MARK": "-"}
    forked = await asyncio.gather(
        *(preloaded.start(command(name, "--help"), environment, logs[name]) for name in names)
    )
    assert [await process.wait() for process in forked] == [0, 0, 0]
    drawn = [number for log in logs.values() for number in log.read_text().split("\n")[-3].split()]
    assert len(set(drawn)) == 6


async def test_how_they_end_is_known(preloaded: Preloaded, tmp_path: Path):
    environment = {**os.environ, "MARK": "-", "STAYS": "yes"}
    refused = await preloaded.start(
        command("policy", "--nonsense"), {**os.environ, "MARK": "-"}, tmp_path / "refused.log"
    )
    assert await refused.wait() == 2
    killed = await preloaded.start(command("policy", "--help"), environment, tmp_path / "k.log")
    assert killed.returncode is None
    assert os.getsid(killed.pid) == killed.pid
    await until(lambda: title_of(killed.pid) == " ".join(command("policy", "--help")))
    os.killpg(killed.pid, signal.SIGKILL)
    assert await killed.wait() == -signal.SIGKILL


async def test_a_replica_that_died_is_forked_again(preloaded: Preloaded, tmp_path: Path):
    supervisor = Supervisor(ignore, [preloaded])
    supervisor.start(spec(tmp_path, "policy", "--help", STAYS="yes"))
    first = await until(lambda: supervisor.pid("--help"))
    os.kill(first, signal.SIGKILL)
    second = await until(lambda: {supervisor.pid("--help")} - {None, first})
    assert "imports" in title_of(parent_of(*second))
    await supervisor.stop(5)
    assert [incident.how for incident in supervisor.incidents] == ["signal 9 (SIGKILL)"]
    assert not is_alive(*second)


async def test_without_who_forks_replicas_are_started(
    preloaded: Preloaded, importable: dict[str, str], tmp_path: Path
):
    supervisor = Supervisor(ignore, [preloaded])
    supervisor.start(spec(tmp_path, "policy", "--help", STAYS="yes"))
    first = await until(lambda: supervisor.pid("--help"))
    os.kill(parent_of(first), signal.SIGKILL)
    await ends_soon(first)
    await until(lambda: not preloaded.takes(command("policy", "--help")))  # which reads of it
    with pytest.raises(PreloadLostError):
        await preloaded.start(command("policy", "--help"), {}, tmp_path / "never.log")
    supervisor.terminate("--help")
    supervisor.start(spec(tmp_path, "rollout", "-h", **importable))
    await supervisor.wait(["-h"])
    assert "rollout [OPTIONS]" in (tmp_path / "-h.log").read_text()
    await supervisor.stop(5)


@pytest.mark.parametrize(
    "argv",
    [
        command("controller", "run"),
        (sys.executable, "-m", "cosmos_app.torchrun", "policy"),
        (sys.executable, "-c", "pass", "policy"),
        command(),
    ],
)
async def test_others_are_started_as_ever(preloaded: Preloaded, argv: tuple[str, ...]):
    assert not preloaded.takes(argv)


def test_all_of_them_end_with_the_launcher(importable: dict[str, str], tmp_path: Path):
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **importable},
    )
    assert launcher.stdout is not None
    pids = [int(word) for word in launcher.stdout.readline().split()]
    assert all(is_alive(pid) for pid in pids)
    launcher.kill()
    launcher.communicate()
    asyncio.run(ends_soon(*pids))


async def test_nothing_to_import_is_no_process():
    async with preloading([Shared(modules=())], {}) as none:
        assert not none


async def test_each_role_comes_from_the_process_that_is_for_it(tmp_path: Path):
    kinds = [
        Shared(modules=["cosmos_app.cli"], roles=frozenset(roles))
        for roles in ({"policy", "warmup"}, {"rollout"})
    ]
    async with preloading(kinds, {}) as preloaded:
        assert [each.takes(command("rollout", "run")) for each in preloaded] == [False, True]
        assert [each.takes(command("policy", "run")) for each in preloaded] == [True, False]
        assert not any(each.takes(command("teacher", "run")) for each in preloaded)
        supervisor = Supervisor(ignore, preloaded)
        for role in ("policy", "rollout", "teacher"):
            supervisor.start(spec(tmp_path, role, "--help"))
            await supervisor.wait(["--help"])
            assert f"{role} [OPTIONS]" in (tmp_path / "--help.log").read_text()
