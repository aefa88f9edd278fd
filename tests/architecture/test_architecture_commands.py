"""The programs take the commands that documents and recipes show; all commands are shown."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from cosmos_app.cli import main as app
from cosmos_app.errors import DataError
from cosmos_app.recipes import load_any_recipe
from cosmos_core import ConfigError
from cosmos_weightsync.command_line import main as weightsync

_PROGRAMS: dict[str, click.Command] = {"cosmos-app": app, "cosmos-weightsync": weightsync}
_FENCED = re.compile(r"^```[^\n]*\n(.*?)^```\s*$", re.M | re.S)
_INLINE = re.compile(r"`((?:cosmos-app|cosmos-weightsync)\s[^`]*)`")
_PLACEHOLDER = re.compile(r"^[^=]*[\[\]]|\||\.\.\.$|^PATH=")  # brackets of a value are a list


class Shown(NamedTuple):
    """One command in a file, as its words."""

    path: Path
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path.name}: {' '.join(self.words)}"


def _lines(path: Path, text: str) -> Iterator[str]:
    if path.suffix == ".toml":
        text = "".join(f"{line[1:]}\n" for line in text.splitlines() if line.startswith("#"))
        yield from text.replace("\\\n", " ").splitlines()
        return
    for block in _FENCED.findall(text):
        yield from block.replace("\\\n", " ").splitlines()
    yield from (" ".join(code.split()) for code in _INLINE.findall(_FENCED.sub("", text)))


def _commands(path: Path) -> Iterator[Shown]:
    for line in _lines(path, path.read_text(encoding="utf-8")):
        line = line.strip().replace("-m cosmos_app ", "cosmos-app ")
        found = re.match(r"(?:.*torchrun .*)?(cosmos-app|cosmos-weightsync) (.*)", line)
        if found:
            words = shlex.split(f"{found[1]} {found[2]}", comments=True)
            yield Shown(path, tuple(words))


@pytest.fixture(scope="module")
def shown(root: Path, text_files: list[Path]) -> list[Shown]:
    dated = {root / "docs" / "log.md", root / "CHANGELOG.md"}  # what was so at the time
    dated |= set((root / "docs" / "decisions").iterdir())
    files = [
        path
        for path in text_files
        if (path.suffix == ".md" and path not in dated)
        or (path.suffix == ".toml" and path.is_relative_to(root / "configs"))
    ]
    return [command for path in files for command in _commands(path)]


def _resolve(words: Sequence[str]) -> tuple[click.Command, Sequence[str]]:
    """Return the innermost command of some words, and the words behind its name."""
    command, rest = _PROGRAMS[words[0]], words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            raise LookupError(f"{command.name} has no command {rest[0]!r}")
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def test_commands_in_documents_and_recipes_are_those_of_the_programs(shown: list[Shown]) -> None:
    assert len(shown) > 100
    wrong: list[str] = []
    for one in shown:
        try:
            command, rest = _resolve(one.words)
        except LookupError as error:
            wrong.append(f"{one}: {error}")
            continue
        taken = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        options = [word.partition("=")[0] for word in rest if word.startswith("--")]
        if not any(_PLACEHOLDER.search(word) for word in one.words[:3]):
            wrong += [f"{one}: no option {option}" for option in options if option not in taken]
    assert not wrong, "\n".join(wrong)


def test_recipes_and_settings_of_shown_commands_are_accepted(
    root: Path, shown: list[Shown]
) -> None:
    wrong: list[str] = []
    for one in shown:
        words = [word for word in one.words if not _PLACEHOLDER.search(word)]
        recipes = [word for word in words if word.endswith(".toml") and "=" not in word]
        settings = [word for word in words if "=" in word and not word.startswith("-")]
        if words[0] != "cosmos-app" or len(recipes) != 1:
            continue
        named = root / ("configs/quickstart.toml" if "/" not in recipes[0] else recipes[0])
        try:
            load_any_recipe(named, settings)
        except (ConfigError, DataError) as error:
            wrong.append(f"{one}: {error}")
    assert not wrong, "\n".join(wrong)


def test_the_readme_of_the_app_names_every_command(root: Path) -> None:
    text = (root / "apps" / "README.md").read_text(encoding="utf-8")
    names = [name for name, command in app.commands.items() if not command.hidden]
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]
    groups = [command for command in app.commands.values() if isinstance(command, click.Group)]
    for group in groups:
        line = next(line for line in text.splitlines() if f"cosmos-app {group.name} " in line)
        assert not [name for name in group.commands if name not in line]


def test_the_list_of_recipes_is_whole(root: Path) -> None:
    listed = (root / "configs" / "README.md").read_text(encoding="utf-8")
    recipes = [path.relative_to(root / "configs") for path in (root / "configs").rglob("*.toml")]
    assert not [path for path in recipes if f"]({path.as_posix()})" not in listed]
