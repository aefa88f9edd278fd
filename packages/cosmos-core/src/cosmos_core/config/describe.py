"""Every key of a config class with its type, default and meaning: for help texts and references."""

import dataclasses
import inspect
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TableDoc:
    """One table of a configuration, or one of the kinds that stand at its place.

    Attributes:
        path: dotted path, as those of keys.
        kind: the value of its ``kind``; "" where there is nothing to choose.
        is_default: whether this is what is there when the table is not given.
        doc: what its class says of itself, on one line.
        keys: what it holds, without ``kind``; tables among them are keys like any other.
    """

    path: str
    kind: str
    is_default: bool
    doc: str
    keys: tuple[FieldDoc, ...]


def describe_config(cls: type) -> list[FieldDoc]:
    """List every key below a config class, depth first, tables before their keys."""
    return list(_table(cls, "", "", None))


def describe_table(cls: type, path: str = "") -> list[TableDoc]:
    """Return the tables that may stand at a path, one of each kind; none where there is no table.

    Args:
        cls: the config class at the root.
        path: dotted, "" for the root. A kind may stand behind its table, as in
            ``rollout.engine.vllm``; elements of a list are ``N``, free keys ``NAME``, and both may
            be left out.
    """
    places = [_Place(cls, None, "", True)]
    for name in path.split(".") if path else ():
        places = [inner for place in places for inner in place.enter(name)]
    seen = dict[type, TableDoc]()
    for place in places:
        seen.setdefault(place.cls, place.described())
    return list(seen.values())


@dataclass(frozen=True, slots=True)
class _Place:
    """A config class at a path, with the value it has there by default."""

    cls: type
    base: Any
    path: str
    is_default: bool

    def enter(self, name: str) -> Iterator["_Place"]:
        """Yield what a name leads to from here: a table below, or this one as a kind."""
        if name in schema.kinds(self.cls):
            yield self
        if name in ("N", "NAME") and self.path.endswith(f".{name}"):
            yield self
        for spec in schema.field_specs(self.cls):
            if spec.name == name:
                where = f"{self.path}.{name}" if self.path else name
                default = spec.default if self.base is None else getattr(self.base, name)
                yield from _places(spec.type, default, where)

    def described(self) -> TableDoc:
        kinds = schema.kinds(self.cls)
        keys = _keys(self.cls, self.path, "", self.base)
        return TableDoc(
            path=self.path,
            kind=kinds[0] if kinds else "",
            is_default=self.is_default,
            doc=_first_line(self.cls),
            keys=tuple(key for key, _, _ in keys if not _is_kind(key, kinds)),
        )


def _places(annotation: Any, default: Any, path: str) -> Iterator[_Place]:
    """Yield the config classes that a type holds, elements of its lists and mappings included."""
    for cls in schema.variants(annotation):
        same = type(default) is cls
        yield _Place(cls, default if same else None, path, same)
    for element, step in _elements(annotation):
        yield from _places(element, dataclasses.MISSING, f"{path}.{step}")


def _is_kind(key: FieldDoc, kinds: tuple[str, ...]) -> bool:
    return bool(kinds) and key.path.rpartition(".")[2] == "kind"


def _first_line(cls: type) -> str:
    paragraph = (inspect.getdoc(cls) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def _keys(
    cls: type, path: str, when: str, base: Any
) -> Iterator[tuple[FieldDoc, schema.FieldSpec, Any]]:
    """Yield the keys of one table, each with its field and its default."""
    for spec in schema.field_specs(cls):
        default = spec.default if base is None else getattr(base, spec.name)
        required = default is schema.MISSING
        where = f"{path}.{spec.name}" if path else spec.name
        key = FieldDoc(
            path=where,
            type=schema.in_words(spec.type),
            default="" if required else schema.in_toml(default),
            required=required,
            doc=spec.doc,
            when=when,
        )
        yield key, spec, default


def _table(cls: type, path: str, when: str, base: Any) -> Iterator[FieldDoc]:
    for key, spec, default in _keys(cls, path, when, base):
        yield key
        yield from _inside(spec.type, key.path, when, default)


def _inside(annotation: Any, path: str, when: str, default: Any) -> Iterator[FieldDoc]:
    variants = schema.variants(annotation)
    for cls in variants:
        kinds = schema.kinds(cls)
        condition = f"{path}.kind = {schema.in_toml(kinds[0])}" if kinds else ""
        # One variant alone has no kind to choose, its keys exist wherever the table does.
        inner = condition if len(variants) > 1 else when
        yield from _table(cls, path, inner, default if type(default) is cls else None)
    for element, step in _elements(annotation):
        yield from _inside(element, f"{path}.{step}", when, dataclasses.MISSING)


def _elements(annotation: Any) -> Iterator[tuple[Any, str]]:
    """Yield the types of elements that hold config classes, each with its step in a path."""
    for member, step in (
        (schema.sequence_member(annotation), "N"),
        (schema.mapping_member(annotation), "NAME"),
    ):
        if member and schema.holds_variants(member):
            yield next(part for part in get_args(member) if schema.holds_variants(part)), step
