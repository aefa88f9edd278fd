"""Where a run's dashboard is, with its token: ``dashboard.json`` of the run directory."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from cosmos_app.listening import exposure
from cosmos_core.rundir import RunDirectory, write_atomic

ADDRESS_FILE = "dashboard.json"
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class DashboardAddress:
    """Where a dashboard is: ``url`` opens in a browser and holds the token."""

    url: str
    port: int
    token: str


def read_address_file(run: RunDirectory) -> DashboardAddress | None:
    """Return where a run's dashboard was last served; none if it never was."""
    try:
        fields = json.loads((run.path / ADDRESS_FILE).read_text())
        return DashboardAddress(
            url=str(fields["url"]), port=int(fields["port"]), token=str(fields["token"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_address_file(run: RunDirectory, address: DashboardAddress) -> None:
    """Leave the address for the run's owner alone: it holds the token."""
    fields = {"url": address.url, "port": address.port, "token": address.token}
    write_atomic(run.path / ADDRESS_FILE, json.dumps(fields) + "\n", mode=0o600)


async def announce_dashboard(run: RunDirectory, say: Callable[[str], None]) -> None:
    """Say where the dashboard is as soon as it is served; for ever silent if it never is."""
    before = _written(run)
    while True:
        address = read_address_file(run) if _written(run) != before else None
        if address is not None:
            say(f"dashboard: {address.url}")
            if told := exposure(urlsplit(address.url).hostname or ""):
                say(told)
            return
        await asyncio.sleep(_LOOK_EVERY_S)


def _written(run: RunDirectory) -> tuple[int, int]:
    """Return what changes when the address is written: by the clock of the file's own machine."""
    try:
        found = (run.path / ADDRESS_FILE).stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino
