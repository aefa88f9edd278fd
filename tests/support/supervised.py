"""Children for a `Supervisor` that run a line of Python."""

import sys
from pathlib import Path

from cosmos_app.supervisor import ChildSpec, Incident

SLEEPING = "import time; time.sleep(600)"


async def ignore(incident: Incident) -> None:
    """Do nothing about a death."""
    del incident


def child(folder: Path, name: str, code: str = SLEEPING, *, restarts: int = 1) -> ChildSpec:
    """Return a child that writes its log into a folder."""
    return ChildSpec(
        name=name,
        argv=(sys.executable, "-c", code),
        environment={},
        log=folder / f"{name}.log",
        restarts=restarts,
    )
