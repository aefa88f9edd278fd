"""The meeting place of a run's replicas, in a process that is none of them."""

import asyncio
import contextlib
import signal
from pathlib import Path

from cosmos_app.roles.parent import die_with_parent
from cosmos_app.sft.files import recipe_of, write_meeting_place
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import MeetingPlace


async def run_meeting(run_dir: Path, host: str) -> int:
    """Host the meeting place until SIGTERM; return 0.

    Raises:
        ConfigError: if the run is no supervised one.
    """
    die_with_parent()
    run = RunDirectory.open(run_dir)
    place = MeetingPlace(recipe_of(run).elastic, host=host)
    write_meeting_place(run, place.address)
    asked = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, asked.set)
    with contextlib.closing(place):
        await asked.wait()
    return 0
