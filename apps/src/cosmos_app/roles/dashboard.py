"""The dashboard's process: started by the controller that has the lease, and gone with it.

A process of its own, of low priority, cannot slow a controller down or take it along.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cosmos_app.control_files import note_begun, read_address
from cosmos_app.dashboard.config import read_dashboard_config
from cosmos_app.dashboard.process import end_dashboard, start_dashboard
from cosmos_app.errors import DashboardAddressError, DataError
from cosmos_app.event_log import EventLog
from cosmos_app.parent import die_with_parent
from cosmos_core.bus import Bus, Dispatch
from cosmos_core.messages import Event
from cosmos_core.rundir import RunDirectory
from cosmos_core.serving_config import DashboardConfig

_NICENESS = 10
_PATIENCE_S = 5.0


async def run_dashboard(run_dir: Path) -> int:
    """Serve a run's dashboard until the controller that started this process ends.

    Returns:
        0, or 2 if its port or its token cannot be had, which the run does not depend on.
    """
    from cosmos_app.dashboard.address import write_address_file
    from cosmos_app.dashboard.api import Served, make_app
    from cosmos_app.dashboard.feed import RunFeed
    from cosmos_app.dashboard.server import open_address, serve

    die_with_parent()
    os.nice(_NICENESS)
    run = RunDirectory.open(run_dir)
    try:
        taken, address = open_address(read_dashboard_config(run.config), run)
    except (DashboardAddressError, DataError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    url, namespace = read_address(run)
    async with await Bus.connect(url, namespace, patience_s=_PATIENCE_S) as bus:
        feed = RunFeed(run)
        app = make_app(Served(feed=feed, send=bus.send_event), address.token)
        await serve(feed, app, taken, started=lambda: write_address_file(run, address))
    return 0


class ControllerJournal:
    """What follows a controller: the log of events, and the dashboard's process.

    Used as a context: the process ends with it.
    """

    def __init__(self, run: RunDirectory, config: DashboardConfig) -> None:
        """Start nothing: a controller that stands by has no dashboard."""
        self._run = run
        self._config = config
        self._log = EventLog(run.path / "events.jsonl")
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, epoch: int) -> None:
        """Note that the run has begun, and start the dashboard.

        That one of the two cannot be done is no reason not to control the run.
        """
        del epoch
        with contextlib.suppress(OSError):
            _, namespace = read_address(self._run)
            note_begun(self._run, namespace)
        if not self._config.enabled:
            return
        with (
            contextlib.suppress(OSError),
            (self._run.logs / "dashboard.log").open("ab") as log,
        ):
            self._process = start_dashboard(self._run.path, log=log, says=log)

    def note(
        self, *, time_s: float, epoch: int, events: Sequence[Event], dispatches: Sequence[Dispatch]
    ) -> None:
        """Write down what happened."""
        self._log.note(time_s=time_s, epoch=epoch, events=events, dispatches=dispatches)

    def __enter__(self) -> "ControllerJournal":
        return self

    def __exit__(self, *_: object) -> None:
        """End the dashboard's process."""
        process, self._process = self._process, None
        if process is not None:
            end_dashboard(process)
