"""The controller's process: the pure controller inside its host. It imports no torch."""

import asyncio
import logging
from pathlib import Path

from cosmos_app.control_files import is_begun, read_address, read_control
from cosmos_app.dashboard.config import read_dashboard_config
from cosmos_app.parent import die_with_parent
from cosmos_app.roles.dashboard import ControllerJournal
from cosmos_app.run_bus import connect_to_run
from cosmos_core.bus import ControllerHost, FencedError, HostConfig, LeaseHeldError
from cosmos_core.rundir import RunDirectory

_STANDBY_S = 0.5


async def run_controller(run_dir: Path, redis_url: str | None, owner: str) -> int:
    """Control a run to its end, waiting for the lease while another controller has it; return 0.

    One whose place another has taken, as it was silent for longer than the lease, stands by again.

    Raises:
        RunError: if the run was never started.
        RunLostError: if Redis has lost the run.
        CodeVersionError: if a controller of another version wrote the run's log.
        ServerSettingsError: if the run is to begin on a server that would lose it.
        BusUnreachableError: if Redis cannot be reached.
    """
    die_with_parent()
    run = RunDirectory.open(run_dir)
    while True:
        try:
            return await _control(run, redis_url, owner)
        except FencedError as error:
            logging.getLogger(__name__).warning("%s, and stands by", error)


async def _control(run: RunDirectory, redis_url: str | None, owner: str) -> int:
    config, cut = read_control(run.path)
    url, namespace = read_address(run)
    with ControllerJournal(run, read_dashboard_config(run.config)) as journal:
        async with await connect_to_run(redis_url or url, namespace) as bus:
            if not is_begun(run, namespace):
                await bus.check_server()
            while True:
                place = HostConfig(owner=owner, is_begun=is_begun(run, namespace))
                host = ControllerHost(bus, config, cut=cut, host=place, journal=journal)
                try:
                    await host.run()
                except LeaseHeldError:
                    await bus.stand_by(owner)
                    await asyncio.sleep(_STANDBY_S)
                else:
                    return 0
