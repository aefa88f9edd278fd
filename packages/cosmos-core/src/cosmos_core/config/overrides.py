"""Overrides from the command line: ``trainer.lr=3e-6`` put into the tables read from a file."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_core.config.errors import ConfigProblem


@dataclass(frozen=True, slots=True)
class OverrideValue:
    """A value given as text, which is read as the type of its field.

    Attributes:
        text: as it was written.
        parsed: the TOML value it spells, or the text itself where it spells none.
    """

    text: str
    parsed: object


@dataclass(frozen=True, slots=True)
class ListPatch:
    """Single elements of a list, to be put over the default one."""

    elements: dict[int, Any]


@dataclass(frozen=True, slots=True)
class Override:
    """One override, split: where it goes and what goes there."""

    text: str
    path: tuple[str, ...]
    value: OverrideValue


def parse_override(text: str) -> Override | ConfigProblem:
    """Split ``path=value``; the path is a dotted TOML key in which a number counts elements."""
    key, equals, value = text.partition("=")
    path = _parse_key(key.strip()) if equals else ()
    if not path:
        return ConfigProblem(
            path="",
            problem=f"override {text!r} is not of the form path=value",
            hint="for example seed=7",
        )
    return Override(text, path, _parse_value(value.strip()))


def apply_overrides(
    raw: Mapping[str, Any], overrides: Sequence[Override]
) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """Return a copy of ``raw`` with the overrides put in, later ones over earlier ones."""
    result, problems = _copy(raw), list[ConfigProblem]()
    for override in overrides:
        try:
            _put(result, override.path, override.value)
        except IndexError as error:
            path = ".".join(override.path)
            problems.append(ConfigProblem(path=path, problem=f"{path}: {error}"))
    return result, problems


def _put(container: Any, path: tuple[str, ...], value: OverrideValue) -> None:
    """Set ``path`` inside a table, a list or a `ListPatch`, making what is missing on the way."""
    index: Any = path[0] if isinstance(container, dict) else int(path[0])
    slots: Any = container.elements if isinstance(container, ListPatch) else container
    if isinstance(slots, list) and index >= len(slots):
        if index > len(slots):
            raise IndexError(f"the list has {len(slots)} elements, counted from 0")
        slots.append(None)
    rest = path[1:]
    if not rest:
        slots[index] = value
        return
    present = slots[index] if isinstance(slots, list) else slots.get(index)
    if isinstance(present, OverrideValue):  # a table or list that an earlier override gave
        present = slots[index] = _copy(present.parsed)
    if not _holds(present, rest[0]):
        present = ListPatch({}) if rest[0].isdecimal() else {}
        slots[index] = present
    _put(present, rest, value)


def _holds(container: Any, key: str) -> bool:
    return isinstance(container, dict) or (
        isinstance(container, (list, ListPatch)) and key.isdecimal()
    )


def _parse_key(key: str) -> tuple[str, ...]:
    try:
        table: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return ()
    path = list[str]()
    while isinstance(table, dict) and len(table) == 1:
        ((part, table),) = table.items()
        path.append(part)
    return tuple(path) if table == 0 else ()


def _parse_value(text: str) -> OverrideValue:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return OverrideValue(text, text)
    return OverrideValue(text, table["value"] if len(table) == 1 else text)


def _copy(raw: Any) -> Any:
    if isinstance(raw, Mapping):
        return {key: _copy(value) for key, value in raw.items()}
    if isinstance(raw, (list, tuple)):
        return [_copy(value) for value in raw]
    return raw
