"""Commands that look at a run, or ask something of it, answer without importing what trains."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from cosmos_app.dashboard.example import write_example_run
from cosmos_app.errors import PARENTS, STAYING, imported
from cosmos_app.given.recipe import GIVEN_KINDS
from cosmos_app.run_kinds import GIVEN

COMMAND = """
import sys
sys.modules["torch"] = None  # importing it is an error
from cosmos_app.cli import main
main()
"""


def ran(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is over, whose Redis has gone with it."""
    path = tmp_path_factory.mktemp("over") / "run"
    write_example_run(path)
    (path / "config.json").write_text(json.dumps({"kind": "rl", "elastic": None}))
    (path / "redis.url").write_text(f"unix://{path}/none.sock")
    (path / "namespace").write_text("run")
    return path


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["replay", "{}", "--list"], 0, "joined"),
        (["status", "{}"], 1, "goes on from its newest checkpoint"),
        (["stop", "{}"], 1, "goes on from its newest checkpoint"),
        (["scale", "{}", "--rollouts", "2"], 1, "goes on from its newest checkpoint"),
        (["scale", "{}", "--policies", "2"], 1, "give the recipe [elastic]"),
        (["stop", "{}/logs"], 2, "is not the directory of a run"),
    ],
)
def test_a_run_is_looked_at_without_torch(run_dir: Path, words: list[str], code: int, said: str):
    returned, text = ran(*(word.format(run_dir) for word in words))
    assert (returned, said in text) == (code, True), text
    assert "Traceback" not in text


def test_the_kinds_without_a_controller_are_those_of_given_data():
    assert set(GIVEN_KINDS) == GIVEN


@pytest.mark.parametrize("named", [PARENTS, STAYING])
def test_every_error_that_is_named_is_there(named):
    for package in named:
        import_module(package)
    classes = imported(named)
    assert len(classes) == len(set(classes)) == sum(map(len, named.values()))
    assert all(issubclass(each, Exception) for each in classes)
