"""Each package's __init__ is its curated surface: sorted, complete, importable, documented."""

import importlib
import inspect
import re

import pytest

PACKAGES = [
    "cosmos_algos", "cosmos_app", "cosmos_core", "cosmos_parallel", "cosmos_rollout",
    "cosmos_weightsync", "cosmos_wfm",
]  # fmt: skip


def _order(name: str) -> tuple[int, list[int | str]]:
    """The order ruff's RUF022 keeps: CONSTANTS, Classes, functions, each in natural order."""
    kind = 0 if name.isupper() else 1 if name.lstrip("_")[:1].isupper() else 2
    parts = re.split(r"(\d+)", name)
    return kind, [f"{int(part):09d}" if part.isdigit() else part for part in parts]


def _exported(package: str) -> list[str]:
    return list(getattr(importlib.import_module(package), "__all__", []))


def _imported_names(package: str) -> set[str]:
    """Public names that the package's __init__ binds, except its own submodules."""
    module = importlib.import_module(package)
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_exported_names_are_sorted(package):
    names = _exported(package)
    assert names == sorted(names, key=_order)


@pytest.mark.parametrize("package", PACKAGES)
def test_exported_names_are_there_and_complete(package):
    exported = _exported(package)
    lazy = set(exported) - _imported_names(package)
    missing = [name for name in lazy if not hasattr(importlib.import_module(package), name)]
    assert not missing, f"{package}.__all__ names what is not there: {missing}"
    extra = sorted(_imported_names(package) - set(exported))
    assert not extra, (
        f"{package} binds {extra} publicly: add them to __all__, or do not import them"
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_exported_names_are_documented(package):
    module = importlib.import_module(package)
    found = []
    for name in _exported(package):
        value = getattr(module, name)
        if (inspect.isclass(value) or inspect.isfunction(value)) and not _own_docstring(value):
            found.append(name)
    assert not found, f"public without a docstring in {package}: {found}"


def _own_docstring(value: object) -> str | None:
    """The docstring a person wrote; a dataclass makes itself one out of its signature."""
    text = value.__doc__
    if inspect.isclass(value) and text and text.startswith(f"{value.__name__}("):
        return None
    return text
