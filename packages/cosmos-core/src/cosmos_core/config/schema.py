"""What a config dataclass says about itself: fields, types in words, defaults and documentation."""

import dataclasses
import inspect
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

MISSING: object = dataclasses.MISSING
NONE_TYPE = type(None)

_WORDS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    Path: "a path",
    NONE_TYPE: "none",
    Any: "any value",
    object: "any value",
}
_PLURALS = {
    "true or false": "truth values",
    "a whole number": "whole numbers",
    "a number": "numbers",
    "a string": "strings",
    "a path": "paths",
    "a table": "tables",
    "any value": "values",
}
_SEQUENCES = (tuple, list, Sequence)
_MAPPINGS = (dict, Mapping)


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field of a config class; ``default`` is `MISSING` where the key has to be given."""

    name: str
    type: Any
    default: object
    doc: str


def field_specs(cls: type) -> tuple[FieldSpec, ...]:
    """Fields of a config class in their order; default factories are called anew each time."""
    types_of, docs = _types_and_docs(cls)
    return tuple(
        FieldSpec(field.name, types_of[field.name], _default(field), docs.get(field.name, ""))
        for field in dataclasses.fields(cls)
        if field.init
    )


def members(annotation: Any) -> tuple[Any, ...]:
    """Alternatives of a type, without `Annotated`: those of a union, otherwise itself alone."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(part for member in get_args(annotation) for part in members(member))
    return (annotation,)


def variants(annotation: Any) -> tuple[type, ...]:
    """The config classes among the alternatives of a type."""
    return tuple(member for member in members(annotation) if dataclasses.is_dataclass(member))  # type: ignore[misc]


def kinds(cls: type) -> tuple[str, ...]:
    """Values of ``kind`` that stand for this class; none if it has no such field."""
    for spec in field_specs(cls):
        if spec.name == "kind" and get_origin(spec.type) is Literal:
            return get_args(spec.type)
    return ()


def sequence_member(annotation: Any) -> Any:
    """The alternative that is a list or a tuple, or None."""
    return next((m for m in members(annotation) if get_origin(m) in _SEQUENCES), None)


def mapping_member(annotation: Any) -> Any:
    """The alternative that is a mapping, or None."""
    return next((m for m in members(annotation) if get_origin(m) in _MAPPINGS), None)


def holds_variants(annotation: Any) -> bool:
    """Whether a config class occurs anywhere inside the type."""
    return bool(variants(annotation)) or any(
        holds_variants(part)
        for member in members(annotation)
        if get_origin(member) in (*_SEQUENCES, *_MAPPINGS)
        for part in get_args(member)
        if part is not ...
    )


def in_words(annotation: Any) -> str:
    """The type as a person would say it: ``one of "keep", "recompute"``, ``a list of numbers``."""
    part, *others = members(annotation)
    if others:
        return " or ".join(dict.fromkeys(in_words(member) for member in (part, *others)))
    if part in _WORDS:
        return _WORDS[part]
    if get_origin(part) is Literal:
        values = [in_toml(value) for value in get_args(part)]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if get_origin(part) in _SEQUENCES:
        return _list_in_words(get_origin(part) is tuple, get_args(part))
    if get_origin(part) in _MAPPINGS or dataclasses.is_dataclass(part):
        return "a table"
    return str(getattr(part, "__name__", part))


def _list_in_words(is_tuple: bool, inner: tuple[Any, ...]) -> str:
    """``a list of numbers``, ``a list of 2 numbers``, ``a list of 2 (a string, a number)``."""
    kinds_of_element = list(dict.fromkeys(in_words(part) for part in inner if part is not ...))
    count = f"{len(inner)} " if is_tuple and ... not in inner else ""
    if len(kinds_of_element) > 1:
        return f"a list of {count}({', '.join(kinds_of_element)})"
    (element,) = kinds_of_element
    if element in _PLURALS:
        return f"a list of {count}{_PLURALS[element]}"
    return f"a list of {count}values, each {element}"


def in_toml(value: object) -> str:
    """A default as it would be written in TOML; a table of a known kind is shortened to it."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value).lower()
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(in_toml(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {in_toml(item)}' for key, item in value.items())}}}"
    if dataclasses.is_dataclass(value):
        kind = getattr(value, "kind", None)
        return f"{{kind = {in_toml(kind)}}}" if kind else "{...}"
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def attribute_docs(cls: type) -> dict[str, str]:
    """Read the "Attributes:" section of a class's docstring: name to text on one line."""
    _, found, section = (inspect.getdoc(cls) or "").partition("Attributes:\n")
    docs = dict[str, str]()
    name = ""
    for line in section.splitlines() if found else ():
        if line and not line.startswith(" "):
            break
        entry = re.match(r" {4}(\w+)(?: \([^)]*\))?: (.*)", line)
        if entry:
            name = entry[1]
            docs[name] = entry[2].strip()
        elif name and line.strip():
            docs[name] += " " + line.strip()
    return docs


@lru_cache(maxsize=512)
def _types_and_docs(cls: type) -> tuple[dict[str, Any], dict[str, str]]:
    docs = dict[str, str]()
    for parent in reversed(cls.__mro__):
        docs |= attribute_docs(parent)
    return get_type_hints(cls, include_extras=True), docs


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
