"""A recipe as it may be shown, kept and sent to sinks: resolved, and without passwords."""

import json
from typing import Any

from cosmos_core.bus import mask_password
from cosmos_core.config import config_to_json

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
