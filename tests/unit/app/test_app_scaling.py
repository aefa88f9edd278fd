"""Who is started when more replicas are wanted; what stop and scale say of dead runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cosmos_app.children import child_specs, replica_spec
from cosmos_app.cli import main
from cosmos_app.control_files import write_address
from cosmos_app.recipe import load_recipe
from cosmos_app.replica_count import missing_replicas
from cosmos_core.rundir import RunDirectory


def status(wanted: int, leaving: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    replicas = {name: {"leaving": True} for name in leaving}
    return {"wanted_rollouts": wanted, "replicas": replicas, **more}


@pytest.mark.parametrize(
    ("said", "running", "expected"),
    [
        ({}, {"rollout-0"}, []),  # no controller has spoken
        (status(-1), {"rollout-0"}, []),  # nobody asked
        (status(3), {"rollout-0"}, ["rollout-1", "rollout-2"]),
        (status(1), {"rollout-0", "rollout-1"}, []),  # the controller sends one away
        (status(2), {"rollout-0", "rollout-2"}, []),
        (status(2), {"rollout-1"}, ["rollout-0"]),  # the first free name
        # one that leaves does not count, and its name is not free yet
        (status(2, leaving=("rollout-1",)), {"rollout-0", "rollout-1"}, ["rollout-2"]),
        (status(3, stopping="Ctrl-C"), {"rollout-0"}, []),
        (status(0), set(), []),
        (status(-1, wanted_policies=2), {"rollout-0", "policy-0"}, ["policy-1"]),
        (status(2, wanted_policies=2), {"policy-0"}, ["rollout-0", "rollout-1", "policy-1"]),
    ],
)
def test_only_what_is_missing_is_started(
    said: dict[str, Any], running: set[str], expected: list[str]
) -> None:
    assert missing_replicas(said, running) == expected


@pytest.mark.parametrize(
    ("overrides", "groups"),
    [
        ([], {"rollout": 1}),
        (["policy.replicas=3", "elastic.min_replicas=2"], {"rollout": 1, "policy": 2}),
    ],
)
def test_those_that_others_go_on_without_are_told_apart(
    tmp_path: Path, overrides: list[str], groups: dict[str, int]
) -> None:
    """Policies that sum their gradients as they are need each other, and everybody a controller."""
    (tmp_path / "recipe.toml").write_text("[rollout]\nreplicas = 2\n")
    recipe = load_recipe(tmp_path / "recipe.toml", overrides)
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        specs = child_specs(recipe, run)
        added = replica_spec(recipe, run, "rollout-7")
    assert {spec.group: spec.needed for spec in [*specs, added] if spec.group} == groups
    assert all(not spec.group or spec.name.startswith(spec.group) for spec in specs)
    assert added.group == "rollout"


@pytest.mark.parametrize("command", [["stop"], ["scale", "--rollouts", "2"]])
def test_a_run_that_is_not_running_is_named(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "run"
    with RunDirectory.create(path, config_json=json.dumps({}), now_s=0.0) as run:
        write_address(run, "redis://:secret@127.0.0.1:1/0", "space")
    result = CliRunner().invoke(main, [*command, str(path)])
    assert result.exit_code == 1
    assert f"{path} is not running" in " ".join(result.output.split())
    assert "secret" not in result.output


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["stop", str(tmp_path)])
    assert result.exit_code != 0
    assert str(tmp_path) in result.output
