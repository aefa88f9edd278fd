"""A package declares all that it imports, so that it installs alone."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

_DISTRIBUTIONS = [
    "packages/cosmos-algos", "packages/cosmos-core", "packages/cosmos-parallel",
    "packages/cosmos-rollout", "packages/cosmos-weightsync", "packages/cosmos-wfm", "apps",
]  # fmt: skip


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _declared(root: Path, distribution: str) -> set[str]:
    project = tomllib.loads((root / distribution / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    requirements = [*project["dependencies"], *(item for extra in extras for item in extra)]
    names = {_normal(re.split(r"[\[<>=!~; ]", item, maxsplit=1)[0]) for item in requirements}
    return names | {_normal(project["name"])}


def _imported(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names


@pytest.mark.parametrize("distribution", _DISTRIBUTIONS)
def test_every_import_is_declared(distribution, root, sources):
    providers = packages_distributions()
    declared = _declared(root, distribution)
    found = {}
    for source in sources:
        if source.path.startswith(f"{distribution}/src/"):
            for module in sorted(_imported(source.tree)):
                names = {_normal(name) for name in providers.get(module, [module])}
                if not names & declared:
                    found.setdefault("/".join(sorted(names)), source.path)
    assert not found, f"{distribution}/pyproject.toml lacks what is imported: {found}"


@pytest.mark.parametrize("distribution", _DISTRIBUTIONS)
def test_a_wheel_carries_the_licence(distribution, root):
    assert (root / distribution / "LICENSE").read_text() == (root / "LICENSE").read_text()


@pytest.mark.parametrize("distribution", _DISTRIBUTIONS)
def test_unit_tests_of_a_package_need_no_other_package(distribution, root, sources):
    """`scripts/check_standalone.sh` runs them with tests/support and what the package declares."""
    trees = {source.path: source.tree for source in sources}
    name = Path(distribution).name.removeprefix("cosmos-").removesuffix("s")
    declared = _declared(root, distribution)
    for path in sorted(trees):
        if path.startswith(f"tests/unit/{name}/"):
            ours = {one for one in _with_support(path, trees) if one.startswith("cosmos_")}
            assert {_normal(one) for one in ours} <= declared, path
    assert "-o pythonpath=tests/support" in (root / "scripts/check_standalone.sh").read_text()


def _with_support(path: str, trees: dict[str, ast.Module]) -> set[str]:
    """Return what a test imports, by way of modules of tests/support too."""
    found, left = set(), [path]
    while left:
        for module in _imported(trees[left.pop()]) - found:
            found.add(module)
            support = f"tests/support/{module}.py"
            if support in trees:
                left.append(support)
    return found
