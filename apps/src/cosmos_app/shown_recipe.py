"""A recipe as it may be shown, kept and sent to sinks: resolved, and without passwords."""

import json
from typing import Any, cast

from rich.console import Console
from rich.text import Text

from cosmos_core.bus import mask_password
from cosmos_core.config import changed_keys, config_to_json, count_keys

_SINKS = ("sinks", "loggers")
"""What recipes of runs, and those of world models, call where their metrics go."""


def shown_recipe(recipe: object) -> dict[str, Any]:
    """Return a recipe's tables; in addresses of Redis and MLflow three stars stand for passwords.

    The run's processes read that of Redis from a file of their owner's alone, and none but the one
    that was given the recipe writes to sinks.
    """
    tables: dict[str, Any] = json.loads(config_to_json(recipe))
    for table in (
        tables.get("bus", {}),
        *(sink for name in _SINKS for sink in tables.get(name, ())),
    ):
        for field in ("url", "uri"):
            if table.get(field):
                table[field] = mask_password(table[field])
    return tables


def shown_as_json(recipe: object) -> str:
    """Return the same as a text that can be read as a recipe again."""
    return json.dumps(shown_recipe(recipe), indent=2) + "\n"


def print_recipe(console: Console, recipe: object, *, whole: bool) -> None:
    """Print a recipe for people: what differs from defaults, as overrides, or all of it as JSON."""
    if whole:
        console.print_json(shown_as_json(recipe))
        return
    tables, changed = shown_recipe(recipe), changed_keys(recipe)
    for path in changed:
        value = Text(_as_override(_value_at(tables, path)), "bold")
        console.print(Text.assemble(path, ("=", "dim"), value), soft_wrap=True)
    left = count_keys(recipe) - len(changed)
    console.print(f"{left} other keys have their defaults: --all shows them", style="dim")


def _value_at(tables: Any, path: str) -> object:
    for name in path.split("."):
        tables = tables[int(name)] if isinstance(tables, list) else tables[name]
    return tables


def _as_override(value: object) -> str:
    if isinstance(value, str):
        return value
    return "none" if value is None else _as_toml(value)


def _as_toml(value: object) -> str:
    if isinstance(value, dict):
        items = cast(dict[str, object], value).items()
        return f"{{{', '.join(f'{json.dumps(key)} = {_as_toml(item)}' for key, item in items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_as_toml, cast(list[object], value)))}]"
    return json.dumps(value, ensure_ascii=False)
