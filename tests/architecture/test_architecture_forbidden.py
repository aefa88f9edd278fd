"""What the code may not do: read the environment below the app, print, keep globals."""

import ast
from pathlib import PurePosixPath

import pytest

_FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "manager", "base", "common", "v2"}


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _reads_environment(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in {"environ", "getenv", "putenv"}
        and _is_name(node.value, "os")
    ) or (
        isinstance(node, ast.ImportFrom)
        and node.module == "os"
        and any(alias.name in {"environ", "getenv"} for alias in node.names)
    )


def _prints(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _is_name(node.func, "print")


def _declares_global(node: ast.AST) -> bool:
    return isinstance(node, ast.Global)


def _probes_self(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and _is_name(node.func, "hasattr")
        and bool(node.args)
        and _is_name(node.args[0], "self")
    )


@pytest.mark.parametrize(
    ("is_forbidden", "instead"),
    [
        (_reads_environment, "take it as a config field; only the app reads the environment"),
        (_prints, "return it, log it, or write it to a metric sink"),
        (_declares_global, "hold the state in an object that is passed in"),
        (_probes_self, "create every attribute in __init__"),
    ],
    ids=["environment", "print", "global", "hasattr-self"],
)
def test_packages_do_not(is_forbidden, instead, package_sources):
    found = [
        f"{source.path}:{node.lineno}: {instead}"
        for source in package_sources
        for node in ast.walk(source.tree)
        if is_forbidden(node)
    ]
    assert not found, "\n".join(found)


def test_imports_are_absolute(sources):
    found = [
        f"{source.path}:{node.lineno}: import by the full name"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert not found, "\n".join(found)


def test_modules_are_named_for_what_they_are(sources):
    found = [
        f"{source.path}: name it for the idea it holds"
        for source in sources
        if _FORBIDDEN_NAMES & set(PurePosixPath(source.path).with_suffix("").parts)
    ]
    assert not found, "\n".join(found)


def test_every_module_says_what_it_is(sources):
    found = [
        f"{source.path}: give it a module docstring"
        for source in sources
        if not source.path.startswith("tests/")
        and source.text.strip()
        and ast.get_docstring(source.tree) is None
    ]
    assert not found, "\n".join(found)


def _patches(node: ast.AST) -> bool:
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    if any(name.startswith(("unittest.mock", "pytest_mock")) for name in names):
        return True
    return (
        isinstance(node, ast.Attribute)
        and node.attr in {"setattr", "setitem"}
        and _is_name(node.value, "monkeypatch")
    )


def test_tests_use_real_things(sources):
    found = [
        f"{source.path}:{node.lineno}: no mocks, no patching; use the real thing or a shipped fake"
        for source in sources
        if source.path.startswith("tests/")
        for node in ast.walk(source.tree)
        if _patches(node)
    ]
    assert not found, "\n".join(found)


def test_test_files_have_unique_names_and_no_packages(sources):
    # pytest imports by path, yet a name that occurs twice is ambiguous in reports and in -k.
    names: dict[str, str] = {}
    found = []
    for source in sources:
        path = PurePosixPath(source.path)
        if path.parts[0] != "tests" or path.name == "conftest.py":
            continue
        if path.name == "__init__.py":
            found.append(f"{path}: tests are no packages; delete it")
        if path.name in names:
            found.append(f"{path} has the name of {names[path.name]}")
        names[path.name] = source.path
    assert not found, "\n".join(found)
