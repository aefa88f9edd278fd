"""Every key of a config class with its type, default and meaning: for help texts and references."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from cosmos_core.config import schema


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldDoc:
    """One key of a configuration.

    Attributes:
        path: dotted path; ``N`` stands for the number of a list element, ``NAME`` for a free key.
        type: the type in words.
        default: the default as TOML, "" where the key has to be given.
        required: whether the key has to be given.
        doc: its entry in the class's "Attributes:" section.
        when: the choice that makes the key exist, ``engine.kind = "vllm"``; "" if it always does.
    """

    path: str
    type: str
    default: str
    required: bool
    doc: str
    when: str = ""


def describe_config(cls: type) -> list[FieldDoc]:
    """List every key below a config class, depth first, tables before their keys."""
    return list(_table(cls, "", "", None))


def _table(cls: type, path: str, when: str, base: Any) -> Iterator[FieldDoc]:
    for spec in schema.field_specs(cls):
        default = spec.default if base is None else getattr(base, spec.name)
        required = default is schema.MISSING
        where = f"{path}.{spec.name}" if path else spec.name
        yield FieldDoc(
            path=where,
            type=schema.in_words(spec.type),
            default="" if required else schema.in_toml(default),
            required=required,
            doc=spec.doc,
            when=when,
        )
        yield from _inside(spec.type, where, when, default)


def _inside(annotation: Any, path: str, when: str, default: Any) -> Iterator[FieldDoc]:
    variants = schema.variants(annotation)
    for cls in variants:
        kinds = schema.kinds(cls)
        condition = f"{path}.kind = {schema.in_toml(kinds[0])}" if kinds else ""
        # One variant alone has no kind to choose, its keys exist wherever the table does.
        inner = condition if len(variants) > 1 else when
        yield from _table(cls, path, inner, default if type(default) is cls else None)
    for member, step in (
        (schema.sequence_member(annotation), "N"),
        (schema.mapping_member(annotation), "NAME"),
    ):
        if member and schema.holds_variants(member):
            element = next(part for part in get_args(member) if schema.holds_variants(part))
            yield from _inside(element, f"{path}.{step}", when, dataclasses.MISSING)
