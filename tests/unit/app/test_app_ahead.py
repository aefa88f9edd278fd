"""Imports begin with the command, and replicas come from the process that makes them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from processes import children_of, ends_soon, importing_from, is_alive

from cosmos_app.ahead import Ahead, importing_ahead
from cosmos_app.cli import main
from cosmos_app.fork_orders import PRELOADER
from cosmos_app.preloaded import Shared, preloading

_LATER = """
import atexit, os, sys
was_there = "cosmos_app.recipe" in sys.modules
atexit.register(lambda: print("later", was_there, os.environ.get("MARK")))
"""
_LAUNCHER = """
import asyncio, os, sys
from pathlib import Path
from cosmos_app.ahead import importing_ahead
from cosmos_app.preloaded import preloading, Shared

async def main(ahead):
    async with preloading([Shared(modules=["later"])], {}, ahead=ahead) as (given,):
        command = [sys.executable, "-m", "cosmos_app", "policy", "--help"]
        forked = await given.start(command, {**os.environ}, Path(sys.argv[1]))
        print(ahead._process.pid, flush=True)
        await asyncio.sleep(60)

with importing_ahead() as ahead:
    asyncio.run(main(ahead))
"""
COMMAND = (sys.executable, "-m", "cosmos_app", "policy", "--help")


@pytest.fixture
def path(tmp_path: Path) -> Mapping[str, str]:
    (tmp_path / "later.py").write_text(_LATER)
    return importing_from(tmp_path)


@pytest.fixture
def ahead(path: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Generator[Ahead]:
    monkeypatch.setenv("PYTHONPATH", path["PYTHONPATH"])
    monkeypatch.delenv(PRELOADER, raising=False)
    with importing_ahead() as given:
        assert given is not None
        yield given


async def test_each_kind_of_replica_goes_on_from_what_all_of_them_import(
    ahead: Ahead, tmp_path: Path
):
    kinds = [
        Shared(modules=["later"], roles=frozenset({"policy"})),
        Shared(modules=["not.there"], roles=frozenset({"rollout"})),
    ]
    async with preloading(kinds, {"MARK": "of imports"}, ahead=ahead) as (policies, rollouts):
        logs = [tmp_path / "policy.log", tmp_path / "rollout.log"]
        for given, log in zip((policies, rollouts), logs, strict=True):
            forked = await given.start(COMMAND, {**os.environ, "MARK": "its own"}, log)
            assert await forked.wait() == 0
        said = [log.read_text().splitlines() for log in logs]
    assert all("policy [OPTIONS]" in lines[0] for lines in said)
    assert said[0][-1] == "later True its own"
    assert not said[1][-1].startswith("later"), "what one kind imports no other has"


async def test_without_it_each_kind_imports_everything_by_itself(
    ahead: Ahead, path: Mapping[str, str], tmp_path: Path
):
    os.kill(ahead._process.pid, signal.SIGKILL)
    await ends_soon(ahead._process.pid)
    async with preloading([Shared(modules=["later"])], path, ahead=ahead) as (given,):
        forked = await given.start(COMMAND, {**os.environ}, tmp_path / "log")
        assert await forked.wait() == 0
    assert (tmp_path / "log").read_text().splitlines()[-1] == "later False None"


async def test_it_ends_where_nothing_is_to_be_forked(ahead: Ahead):
    async with preloading([Shared(modules=())], {}, ahead=ahead) as none:
        assert not none
        assert not is_alive(ahead._process.pid)


def test_whoever_has_no_use_for_it_has_none(monkeypatch: pytest.MonkeyPatch):
    with importing_ahead(is_wanted=False) as none:
        assert none is None
    for name in (PRELOADER, "TORCHELASTIC_RUN_ID"):
        with monkeypatch.context() as patched:
            patched.delenv(PRELOADER, raising=False)
            patched.setenv(name, "there")
            with importing_ahead() as none:
                assert none is None


def test_all_of_them_end_with_the_launcher(path: Mapping[str, str], tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name != PRELOADER}
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, **path},
    )
    assert launcher.stdout is not None
    first = int(launcher.stdout.readline())
    (of_policies,) = children_of(first)
    launcher.kill()
    launcher.communicate()
    asyncio.run(ends_soon(first, of_policies))


def test_a_recipe_that_is_wrong_leaves_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv(PRELOADER, raising=False)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("nonsense = 1")
    before = children_of(os.getpid())
    assert CliRunner().invoke(main, ["run", str(recipe)]).exit_code == 2
    assert children_of(os.getpid()) == before
