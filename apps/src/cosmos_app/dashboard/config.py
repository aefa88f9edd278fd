"""The recipe's table ``[dashboard]``, readable without the rest of the recipe."""

import json
from pathlib import Path

from cosmos_core.config import config_from_json
from cosmos_core.serving_config import DashboardConfig


def read_dashboard_config(config: Path) -> DashboardConfig:
    """Read the table from a run's resolved configuration; runs from before it have the default.

    Raises:
        ConfigError: if the table is not one of ours.
    """
    table = json.loads(config.read_text()).get("dashboard", {})
    return config_from_json(DashboardConfig, json.dumps(table))
