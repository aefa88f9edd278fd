"""From tables to a config object: each field checked, each problem noted, nothing raised midway.

A table is read on top of its default: keys it leaves out keep the values that the enclosing class
gives them. Leaves are checked by pydantic in strict JSON mode, so that ``"3"`` is not 3, 3 is a
float where one is wanted, and a string is a path. NaN is nothing that anybody means; infinity is,
for limits that shall not bind.
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import date, time
from functools import lru_cache
from pathlib import PurePath
from typing import Any, cast, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from cosmos_core.config import schema
from cosmos_core.config.errors import ConfigProblem
from cosmos_core.config.overrides import ListPatch, OverrideValue

INVALID: Any = object()
_NOTHING: Any = object()


class Builder:
    """Builds one config tree and collects its problems.

    Args:
        known_paths: every key of the tree, for suggestions.
    """

    def __init__(self, known_paths: Sequence[str]) -> None:
        self.problems = list[ConfigProblem]()
        self._known_paths = known_paths

    def build(self, annotation: Any, raw: Any, path: str, default: Any = _NOTHING) -> Any:
        """Return the value of a field, or `INVALID` after noting why there is none."""
        if isinstance(raw, OverrideValue) and isinstance(raw.parsed, (dict, list)):
            raw = raw.parsed
        variants = schema.variants(annotation)
        if variants and isinstance(raw, variants):
            return raw
        if isinstance(raw, ListPatch):
            return self._patched(annotation, raw, path, default)
        if isinstance(raw, Mapping):
            if variants:
                return self._table(variants, cast(Mapping[str, Any], raw), path, default)
            member = schema.mapping_member(annotation)
            if member and schema.holds_variants(member):
                return self._mapping(member, cast(Mapping[str, Any], raw), path)
        if isinstance(raw, (list, tuple)):
            member = schema.sequence_member(annotation)
            if member and schema.holds_variants(member):
                return self._sequence(member, cast(Sequence[Any], raw), path)
        return self._leaf(annotation, raw, path)

    def _note(self, path: str, problem: str, hint: str = "") -> Any:
        self.problems.append(ConfigProblem(path=path, problem=problem, hint=hint))
        return INVALID

    def _table(
        self, variants: tuple[type, ...], raw: Mapping[str, Any], path: str, default: Any
    ) -> Any:
        cls = self._choose(variants, raw, path, default)
        if cls is None:
            return INVALID
        specs = schema.field_specs(cls)
        names = [spec.name for spec in specs]
        noted = len(self.problems)
        for key in raw:
            if key not in names:
                where = _join(path, key)
                self._note(where, f"unknown key {where}", self._suggest(key, cls, variants, path))
        base = default if type(default) is cls else None
        values = {spec.name: self._field(spec, raw, path, base) for spec in specs}
        if len(self.problems) > noted:
            return INVALID
        try:
            return cls(**values)
        except ValueError as error:
            said = str(error).removeprefix(f"{path.rpartition('.')[2]}: ")  # some name themselves
            return self._note(path, f"{path}: {said}" if path else str(error))

    def _field(self, spec: schema.FieldSpec, raw: Mapping[str, Any], path: str, base: Any) -> Any:
        default = spec.default if base is None else getattr(base, spec.name)
        where = _join(path, spec.name)
        if spec.name in raw:
            return self.build(spec.type, raw[spec.name], where, default)
        if default is schema.MISSING:
            problem = f"missing key {where} ({schema.in_words(spec.type)})"
            return self._note(where, problem, spec.doc.rstrip("."))
        return default

    def _choose(
        self, variants: tuple[type, ...], raw: Mapping[str, Any], path: str, default: Any
    ) -> type | None:
        """Tell which class of a union a table stands for, by its ``kind``."""
        if len(variants) == 1:
            return variants[0]
        by_kind = {kind: cls for cls in variants for kind in schema.kinds(cls)}
        choices = ", ".join(schema.in_toml(kind) for kind in by_kind)
        kind = raw.get("kind")
        kind = kind.text if isinstance(kind, OverrideValue) and kind.text in by_kind else kind
        kind = kind.parsed if isinstance(kind, OverrideValue) else kind
        where = _join(path, "kind")
        if kind is None:
            if type(default) in variants:
                return type(default)
            self._note(where, f"missing key {where}", f"one of {choices}")
            return None
        if not isinstance(kind, str) or kind not in by_kind:
            close = difflib.get_close_matches(str(kind), by_kind, n=1)
            hint = f'did you mean "{close[0]}"?' if close else f"one of {choices}"
            self._note(where, f"{where} is {schema.in_toml(kind)}, which is no known kind", hint)
            return None
        return by_kind[kind]

    def _suggest(self, key: str, cls: type, variants: tuple[type, ...], path: str) -> str:
        names = [spec.name for spec in schema.field_specs(cls)]
        close = difflib.get_close_matches(key, names, n=1)
        if close:
            return f"did you mean {_join(path, close[0])}?"
        for other in variants:
            if key in (spec.name for spec in schema.field_specs(other)):
                return f"it is a key of kind {schema.in_toml(schema.kinds(other)[0])}"
        elsewhere = [known for known in self._known_paths if known.rpartition(".")[2] == key]
        if elsewhere:
            return f"did you mean {elsewhere[0]}?"
        return f"known keys here: {', '.join(names)}"

    def _mapping(self, member: Any, raw: Mapping[str, Any], path: str) -> Any:
        _, inner = get_args(member)
        values = {key: self.build(inner, value, _join(path, key)) for key, value in raw.items()}
        return INVALID if any(value is INVALID for value in values.values()) else values

    def _sequence(
        self, member: Any, raw: Sequence[Any], path: str, defaults: Sequence[Any] = ()
    ) -> Any:
        inner = get_args(member)
        fixed = get_origin(member) is tuple and ... not in inner
        if fixed and len(raw) != len(inner):
            wanted = schema.in_words(member)
            return self._note(path, f"{path} needs {wanted}, found {len(raw)} values")
        values = [
            self.build(
                inner[index if fixed else 0],
                value,
                _join(path, str(index)),
                defaults[index] if index < len(defaults) else _NOTHING,
            )
            for index, value in enumerate(raw)
        ]
        if any(value is INVALID for value in values):
            return INVALID
        return values if get_origin(member) is list else tuple(values)

    def _patched(self, annotation: Any, patch: ListPatch, path: str, default: Any) -> Any:
        """Put single elements over a default list."""
        member = schema.sequence_member(annotation)
        if member is None:
            return self._note(
                path, f"{path} needs {schema.in_words(annotation)}, it has no elements"
            )
        present = cast(Sequence[Any], default) if isinstance(default, (list, tuple)) else ()
        size = max(len(present), 1 + max(patch.elements))
        if sum(index >= len(present) for index in patch.elements) < size - len(present):
            where = _join(path, str(max(patch.elements)))
            return self._note(
                where, f"{where} does not exist", f"{path} has {len(present)} elements"
            )
        raw = [
            patch.elements[index] if index in patch.elements else present[index]
            for index in range(size)
        ]
        if not schema.holds_variants(member):
            return self._leaf(annotation, raw, path)
        return self._sequence(member, raw, path, present)

    def _leaf(self, annotation: Any, raw: Any, path: str) -> Any:
        overridden = isinstance(raw, OverrideValue)
        readings = _readings(raw) if overridden else [_with_readings(annotation, raw)]
        failure: ValidationError | TypeError | None = None
        for reading in readings:
            try:
                text = json.dumps(reading, default=_plain)
                value = _adapter(annotation).validate_json(text, strict=True)
            except (ValidationError, TypeError) as error:
                failure = failure or error
                continue
            if _has_nan(value):  # comparisons with a range would let it pass
                return self._note(path, f"{path} has to be a number, found nan")
            if isinstance(value, PurePath) and "\0" in str(value):  # no system takes it
                return self._note(path, f"{path} is no path: {str(value)!r} has a NUL in it")
            return value
        found = readings[-1] if readings[0] is None else readings[0]
        return self._note(*_leaf_problem(annotation, found, path, failure))


def _readings(override: OverrideValue) -> list[object]:
    """Return what the text of an override may mean, likeliest first."""
    nothing = [None] if override.text == "none" else []
    return [*nothing, override.parsed, override.text]


def _with_readings(annotation: Any, raw: Any) -> Any:
    """Return a list or a table in which what overrides gave is of the types wanted there."""
    if isinstance(raw, OverrideValue):
        fitting = (one for one in _readings(raw) if _failure_of(annotation, one) is None)
        return raw.parsed if annotation is None else next(fitting, raw.parsed)
    if isinstance(raw, list):
        items = enumerate(cast(list[Any], raw))
        return [_with_readings(_element_type(annotation, (at,)), item) for at, item in items]
    if isinstance(raw, Mapping):
        named = cast(Mapping[str, Any], raw).items()
        return {key: _with_readings(_element_type(annotation, (key,)), item) for key, item in named}
    return raw


def _leaf_problem(
    annotation: Any, found: Any, path: str, failure: ValidationError | TypeError | None
) -> tuple[str, str, str]:
    """Say where in a leaf something is wrong, what was found there and what would be right."""
    if isinstance(failure, ValidationError):
        first = failure.errors(include_url=False)[0]
        if _is_constraint(first["type"]) and not first["loc"]:
            rule = first["msg"].replace("Input should be", "has to be")
            return path, f"{path} {rule}, found {_found(found)}", ""
        inner = _element_type(annotation, first["loc"])
        if inner is not None and _has(found, first["loc"][0]):
            key = first["loc"][0]
            within = _failure_of(inner, found[key])
            return _leaf_problem(inner, found[key], _join(path, str(key)), within)
    problem = f"{path} needs {schema.in_words(annotation)}, found {_found(found)}"
    return path, problem, _leaf_hint(annotation, found)


def _failure_of(annotation: Any, found: Any) -> ValidationError | TypeError | None:
    try:
        _adapter(annotation).validate_json(json.dumps(found, default=_plain), strict=True)
    except (ValidationError, TypeError) as error:
        return error
    return None


def _element_type(annotation: Any, place: tuple[int | str, ...]) -> Any:
    """Type of the element of a container that pydantic points at, or None."""
    sequence, mapping = schema.sequence_member(annotation), schema.mapping_member(annotation)
    if len(schema.members(annotation)) > 1 or not place:
        return None
    if sequence and isinstance(place[0], int):
        inner = get_args(sequence)
        at = place[0] if get_origin(sequence) is tuple and ... not in inner else 0
        return inner[at] if at < len(inner) else None
    return get_args(mapping)[1] if mapping else None


def _has(container: Any, key: int | str) -> bool:
    if isinstance(container, list):
        return isinstance(key, int) and key < len(cast(list[Any], container))
    return isinstance(container, Mapping) and key in container


def _leaf_hint(annotation: Any, found: Any) -> str:
    choices = [
        value
        for member in schema.members(annotation)
        for value in get_args(member)
        if isinstance(value, str)
    ]
    if isinstance(found, str):
        close = difflib.get_close_matches(found.lower(), choices, n=1)
        if close:
            return f'did you mean "{close[0]}"?'
        if bool in schema.members(annotation) and found.lower() in ("true", "false"):
            return f"write {found.lower()}, without quotes"
        if {int, float} & set(schema.members(annotation)) and _is_number(found):
            return f"write {found}, without quotes"
    elif str in schema.members(annotation) and not isinstance(found, (list, Mapping)):
        return f'write "{schema.in_toml(found)}", in quotes'
    return ""


def _found(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(cast(Sequence[Any], value))}"
    return schema.in_toml(value)


def _is_constraint(error_type: str) -> bool:
    """Whether pydantic's error is about a value of the right type."""
    return error_type.startswith((
        "greater_than", "less_than", "multiple_of", "finite_number", "string_pattern",
        "string_too", "too_", "value_error",
    ))  # fmt: skip


def _has_nan(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_nan, cast(Mapping[object, object], value).values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_nan, cast(Sequence[object], value)))
    return isinstance(value, float) and math.isnan(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _plain(value: object) -> object:
    if isinstance(value, OverrideValue):
        return value.parsed
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (date, time)):
        return value.isoformat()
    if dataclasses.is_dataclass(value):
        raise TypeError("a config object where none is wanted")
    raise TypeError(f"{type(value).__name__} cannot be written in TOML")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


@lru_cache(maxsize=512)
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)
