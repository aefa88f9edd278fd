"""What a config says besides its defaults."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

from cosmos_core.config.schema import MISSING, field_specs


def changed_keys(config: object) -> list[str]:
    """Return the dotted paths of all keys whose values are not those of a config that is empty.

    In a table of another kind than the default one, and in elements of a list, these are the keys
    that differ from the defaults of their own class, and which kind it is. Of a table without kinds
    where the default is none they are all its keys. Paths are those of overrides:
    ``rewards.0.kind``.
    """
    return list(_changed(config, MISSING, ""))


def count_keys(config: object) -> int:
    """Return how many keys a config has, those of its tables and of elements of lists included."""
    if _is_config(config):
        return sum(count_keys(getattr(config, spec.name)) for spec in field_specs(type(config)))
    items = _tables_of(config)
    return sum(map(count_keys, items)) if items else 1


def _changed(value: object, default: object, path: str) -> Iterator[str]:
    if _is_config(value):
        specs = field_specs(type(value))
        same = type(default) is type(value)
        has_kind = any(spec.name == "kind" for spec in specs)
        for spec in specs:
            at = f"{path}.{spec.name}" if path else spec.name
            if spec.name == "kind" and not same:
                yield at
            else:
                absent = MISSING if path and not has_kind else spec.default
                own = getattr(default, spec.name) if same else absent
                yield from _changed(getattr(value, spec.name), own, at)
    elif value != default:
        items = _tables_of(value)
        if not items:
            yield path
        for place, item in enumerate(items):
            yield from _changed(item, MISSING, f"{path}.{place}")


def _tables_of(value: object) -> Sequence[object]:
    """Return the elements of a list of tables; nothing for any other value."""
    if not isinstance(value, (tuple, list)):
        return ()
    items = cast(Sequence[object], value)
    return items if all(map(_is_config, items)) else ()


def _is_config(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
