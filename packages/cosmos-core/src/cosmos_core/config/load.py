"""Loading: a TOML or JSON file, or tables, and overrides, into one frozen config object."""

import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, TypeVar, cast

from cosmos_core.config.build import INVALID, Builder
from cosmos_core.config.describe import describe_config
from cosmos_core.config.errors import ConfigError, ConfigProblem
from cosmos_core.config.overrides import Override, apply_overrides, parse_override

T = TypeVar("T")


def load_config(
    cls: type[T], source: Path | Mapping[str, object], overrides: Sequence[str] = ()
) -> T:
    """Read a config object of class ``cls``, a tree of frozen dataclasses.

    Keys that are left out keep their defaults. Unions of config classes are told apart by a field
    ``kind: Literal[...]``; a table without ``kind`` is of the kind of the default. An override
    ``path=value`` is read as the type of its field: ``name=7`` is the string "7" where a string is
    wanted, ``limit=none`` no limit where none is allowed, ``sinks.0.path=x`` changes one element,
    ``betas=[0.9, 0.95]`` the whole list. Later overrides win over earlier ones and over the file.

    Args:
        cls: the class at the root.
        source: a ``.toml`` file, a ``.json`` file as `config_to_json` writes it, or the tables.
        overrides: each ``path=value``.

    Raises:
        ConfigError: with every problem found: unknown and missing keys, wrong types, values that a
            class refuses, a file that is missing or cannot be parsed.
    """
    raw, text = _read(source)
    parsed = [parse_override(override) for override in overrides]
    problems = [problem for problem in parsed if isinstance(problem, ConfigProblem)]
    good = [override for override in parsed if isinstance(override, Override)]
    tables, misplaced = apply_overrides(raw, good)
    builder = Builder([field.path for field in describe_config(cls)])
    config = builder.build(cls, tables, "")
    name = str(source) if isinstance(source, Path) else ""
    problems += [
        dataclasses.replace(problem, source=_origin(problem, name, text, good))
        for problem in (*misplaced, *builder.problems)
    ]
    if problems or config is INVALID:
        raise ConfigError(problems)
    return config


def config_to_json(config: object) -> str:
    """Return the whole config, defaults included, as JSON that `config_from_json` reads back."""
    return json.dumps(_to_plain(config), indent=2) + "\n"


def config_from_json(cls: type[T], text: str) -> T:
    """Read back what `config_to_json` wrote: the config is equal to the one written.

    Raises:
        ConfigError: as `load_config`, also for text that is not JSON.
    """
    return load_config(cls, _parse_json(text, ""))


def _read(source: Path | Mapping[str, object]) -> tuple[Mapping[str, Any], str]:
    """Return the tables and, for a TOML file, its text."""
    if not isinstance(source, Path):
        return source, ""
    if source.is_dir():
        problem = f"{source} is a directory, not a TOML file"
        raise ConfigError([ConfigProblem(path="", problem=problem, hint="name a file in it")])
    if not source.is_file():
        near = [str(path) for path in source.parent.glob("*.toml")]
        close = difflib.get_close_matches(str(source), near, n=1)
        hint = f"did you mean {close[0]}?" if close else ""
        raise ConfigError([ConfigProblem(path="", problem=f"there is no file {source}", hint=hint)])
    try:
        text = source.read_text(encoding="utf-8-sig")  # editors on Windows put a mark before it
    except UnicodeDecodeError as error:
        problem = ConfigProblem(
            path="", problem=f"not UTF-8: {error}", source=str(source), hint="save it as UTF-8"
        )
        raise ConfigError([problem]) from error
    if source.suffix == ".json":
        return _parse_json(text, str(source)), ""
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        problem = ConfigProblem(path="", problem=f"not TOML: {error}", source=str(source))
        raise ConfigError([problem]) from error


def _parse_json(text: str, source: str) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        problem = ConfigProblem(path="", problem=f"not JSON: {error}", source=source)
        raise ConfigError([problem]) from error
    if not isinstance(raw, dict):
        problem = f"needs an object of keys and values, found a {type(raw).__name__}"
        raise ConfigError([ConfigProblem(path="", problem=problem, source=source)])
    return cast(dict[str, Any], raw)


def _origin(problem: ConfigProblem, name: str, text: str, overrides: Sequence[Override]) -> str:
    """Say where a key was written: by the last override that set it, or in a line of the file.

    Of a table whose keys do not go together, by the last override of a key that is spoken of.
    """
    parts = tuple(problem.path.split("."))
    said = set(re.findall(r"\w+", problem.problem))
    for override in reversed(overrides):
        is_whole = parts[: len(override.path)] == override.path
        if is_whole or (override.path[: len(parts)] == parts and override.path[-1] in said):
            return f"override {override.text}"
    line = _line_of(parts, text)
    return f"{name}:{line}" if name and line else name


def _line_of(parts: tuple[str, ...], text: str) -> int:
    """Find the line of a TOML file that sets a key, or else opens its table; 0 if there is none."""
    best, best_length, table = 0, 0, tuple[str, ...]()
    counts = dict[tuple[str, ...], int]()
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]", line)
        key = re.match(r"\s*([\w.\-\"']+)\s*=", line)
        if header:
            table = _key_parts(header[2])
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = (*table, str(counts[table]))
        found = table if header else (*table, *_key_parts(key[1])) if key else ()
        if len(found) > best_length and parts[: len(found)] == found:
            best, best_length = number, len(found)
    return best


def _key_parts(key: str) -> tuple[str, ...]:
    return tuple(part.strip(" \t\"'") for part in key.split("."))


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _to_plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.init
        }
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, (tuple, list)):
        return [_to_plain(item) for item in cast(Sequence[Any], value)]
    if isinstance(value, PurePath):
        return str(value)
    return _to_plain(value.value) if isinstance(value, Enum) else value
