"""The recipe's table ``[dashboard]``, readable without the rest of the recipe."""

import json
from dataclasses import dataclass
from pathlib import Path

from cosmos_core.config import config_from_json


@dataclass(frozen=True, kw_only=True, slots=True)
class DashboardConfig:
    """The page and HTTP API of a run, served beside its controller.

    Attributes:
        enabled: whether it is served; ``cosmos-app replay`` serves it at any time.
        host: address it listens on; anything but loopback is reachable from other machines.
        port: its port; 0 for any free one, the same again after a restart.
        token_file: file whose first line is the token; each run makes a token of its own when there
            is none. It never stands in a recipe, since sinks send recipes on.
    """

    enabled: bool = True
    host: str = "127.0.0.1"
    port: int = 0
    token_file: Path | None = None

    def __post_init__(self) -> None:
        """Check the port.

        Raises:
            ValueError: if it is no port.
        """
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; want 0 for any free one, or 1 to 65535")


def read_dashboard_config(config: Path) -> DashboardConfig:
    """Read the table from a run's resolved configuration; runs from before it have the default.

    Raises:
        ConfigError: if the table is not one of ours.
    """
    table = json.loads(config.read_text()).get("dashboard", {})
    return config_from_json(DashboardConfig, json.dumps(table))
