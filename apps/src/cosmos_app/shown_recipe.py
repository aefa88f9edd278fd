"""A recipe as it may be shown and kept: resolved, and without the password of its Redis."""

import json
from typing import Any

from cosmos_core.bus import mask_password
from cosmos_core.config import config_to_json


def shown_recipe(recipe: object) -> dict[str, Any]:
    """Return a recipe's tables; of ``bus.url`` the password is replaced by three stars.

    The run's processes read it from a file of their owner's alone.
    """
    tables: dict[str, Any] = json.loads(config_to_json(recipe))
    bus = tables.get("bus", {})
    if bus.get("url"):
        bus["url"] = mask_password(bus["url"])
    return tables


def shown_as_json(recipe: object) -> str:
    """Return the same as a text that can be read as a recipe again."""
    return json.dumps(shown_recipe(recipe), indent=2) + "\n"
