"""The parts of the repository that the rules of this folder are about."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_SKIPPED = {".venv", ".git", "runs", "wandb", "build", "dist", "__pycache__", "node_modules"}
_TEXT = {".md", ".py", ".toml", ".txt", ".sh", ".yaml", ".yml", ".json", ".cfg", ".jinja"}


class Source(NamedTuple):
    """One Python module: its path below the repository root, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module


def _files(root: Path) -> Iterator[Path]:
    for entry in sorted(root.iterdir()):
        if entry.is_dir():
            if entry.name not in _SKIPPED and not entry.name.startswith((".pytest", ".ruff")):
                yield from _files(entry)
        else:
            yield entry


@pytest.fixture(scope="session")
def root() -> Path:
    return _ROOT


@pytest.fixture(scope="session")
def text_files(root: Path) -> list[Path]:
    """Every file of the repository that a person wrote as text."""
    named = {"Makefile", "run", "LICENSE", ".gitignore"}
    return [path for path in _files(root) if path.suffix in _TEXT or path.name in named]


@pytest.fixture(scope="session")
def sources(text_files: list[Path]) -> list[Source]:
    """Every Python module of the repository."""
    found = []
    for path in text_files:
        if path.suffix == ".py":
            text = path.read_text(encoding="utf-8")
            name = path.relative_to(_ROOT).as_posix()
            found.append(Source(name, text, ast.parse(text, filename=name)))
    return found


@pytest.fixture(scope="session")
def package_sources(sources: list[Source]) -> list[Source]:
    """The modules below packages/: libraries, which leave the environment to the app."""
    return [source for source in sources if source.path.startswith("packages/")]
