"""What a run's own temporary directory is called, and which directories a process of it has."""

import tempfile
from pathlib import Path

RUN_PREFIX = "cosmos-run-"


def temporary_directories() -> list[Path]:
    """Return where this process writes temporary files; of a run's own, what that lies in too."""
    own = Path(tempfile.gettempdir())
    return [own, own.parent] if own.name.startswith(RUN_PREFIX) else [own]
