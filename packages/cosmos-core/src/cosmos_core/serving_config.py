"""The table ``[dashboard]`` of every kind of recipe; the app serves what it describes."""

from dataclasses import dataclass
from pathlib import Path


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
