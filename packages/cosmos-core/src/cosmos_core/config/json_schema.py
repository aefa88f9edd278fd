"""A config class as a JSON Schema, with which editors complete and check TOML files.

The schema says what tables hold and of which types. Rules between values are in ``__post_init__``,
where only the loader finds them: what the loader takes fits the schema, not the other way round.
"""

import inspect
import math
from typing import Any, get_args

from pydantic import TypeAdapter

from cosmos_core.config import schema

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(cls: type) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of files that are read as a config class."""
    definitions = dict[str, Any]()
    root = _reference(cls, schema.MISSING, definitions, chosen=False)
    return {"$schema": _DRAFT, "title": cls.__name__, **root, "$defs": definitions}


def _reference(
    cls: type, default: Any, definitions: dict[str, Any], *, chosen: bool
) -> dict[str, Any]:
    """Refer to a class's definition; keys that its place has no default for are required here.

    So is ``kind`` where it chooses this class among others, unless this is the default.
    """
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name not in definitions:
        definitions[name] = {}  # a class that holds itself refers to this
        definitions[name] = _table(cls, definitions)
    needed = [spec.name for spec in schema.field_specs(cls) if spec.default is schema.MISSING]
    needed += ["kind"] if chosen and schema.kinds(cls) and "kind" not in needed else []
    found: dict[str, Any] = {"$ref": f"#/$defs/{name}"}
    return found if type(default) is cls or not needed else found | {"required": needed}


def _table(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    properties = dict[str, Any]()
    for spec in schema.field_specs(cls):
        found = _value(spec.type, spec.default, definitions)
        if spec.doc:
            found["description"] = spec.doc
        properties[spec.name] = found | _default(spec)
    return {
        "type": "object",
        "description": " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split()),
        "properties": properties,
        "additionalProperties": False,
    }


def _value(annotation: Any, default: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if not schema.holds_variants(annotation):
        return _leaf(annotation)
    variants = schema.variants(annotation)
    several = len(variants) > 1
    choices = [_reference(cls, default, definitions, chosen=several) for cls in variants]
    choices += [
        _of_elements(member, definitions)
        for member in schema.members(annotation)
        if not schema.variants(member) and member is not schema.NONE_TYPE
    ]
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def _of_elements(member: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a list or a mapping of tables, or of what else is no table."""
    if not schema.holds_variants(member):
        return _leaf(member)
    element = next(part for part in get_args(member) if schema.holds_variants(part))
    inner = _value(element, schema.MISSING, definitions)
    if schema.mapping_member(member):
        return {"type": "object", "additionalProperties": inner}
    return {"type": "array", "items": inner}


def _leaf(annotation: Any) -> dict[str, Any]:
    """Return what pydantic says of a type, without none, which TOML cannot say."""
    found = TypeAdapter(annotation).json_schema()
    found.pop("default", None)
    choices = [one for one in found.get("anyOf", ()) if one != {"type": "null"}]
    if len(choices) == 1:
        return dict(choices[0])
    return found | {"anyOf": choices} if choices else found


def _default(spec: schema.FieldSpec) -> dict[str, Any]:
    """Return the default of a key that holds no table, where JSON can say it."""
    value = spec.default
    if value is schema.MISSING or value is None or schema.holds_variants(spec.type):
        return {}
    if isinstance(value, float) and not math.isfinite(value):
        return {}
    return {"default": TypeAdapter(spec.type).dump_python(value, mode="json")}
