"""The layers between packages, and the facts that all seven distributions share."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

DISTRIBUTIONS = [
    "packages/cosmos-algos", "packages/cosmos-core", "packages/cosmos-parallel",
    "packages/cosmos-rollout", "packages/cosmos-weightsync", "packages/cosmos-wfm", "apps",
]  # fmt: skip


def _project(root: Path, distribution: str) -> dict:
    return tomllib.loads((root / distribution / "pyproject.toml").read_text())["project"]


def _import_name(distribution: str) -> str:
    return "cosmos_app" if distribution == "apps" else Path(distribution).name.replace("-", "_")


def test_import_contracts_hold(root):
    sources = [str(root / distribution / "src") for distribution in DISTRIBUTIONS]
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_all_distributions_have_one_version(root):
    versions = {name: _project(root, name)["version"] for name in [*DISTRIBUTIONS, "."]}
    assert len(set(versions.values())) == 1, versions


def test_siblings_are_required_in_that_very_version(root):
    for distribution in DISTRIBUTIONS:
        project = _project(root, distribution)
        for requirement in project["dependencies"]:
            if requirement.startswith("cosmos-"):
                assert requirement.endswith(f"=={project['version']}"), (distribution, requirement)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_distribution_is_typed_and_has_a_readme(root, distribution):
    assert (root / distribution / "src" / _import_name(distribution) / "py.typed").exists()
    readme = (root / distribution / "README.md").read_text(encoding="utf-8")
    assert "pip install" in readme, f"{distribution}/README.md lacks its pip install line"
