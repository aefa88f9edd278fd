"""The meeting place of a run's replicas, in a process that is none of them."""

import asyncio
from pathlib import Path

from cosmos_app.given.files import recipe_of, write_meeting_place
from cosmos_app.roles.parent import die_with_parent
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import MeetingPlace


async def run_meeting(run_dir: Path, host: str) -> int:
    """Host the meeting place until a signal ends the process.

    SIGTERM is left to end it at once: a Lighthouse that is shut down waits for its connections, and
    nothing that it knows is worth the wait.

    Raises:
        ConfigError: if the run is no supervised one.
    """
    die_with_parent()
    run = RunDirectory.open(run_dir)
    place = MeetingPlace(recipe_of(run).elastic, host=host)
    write_meeting_place(run, place.address)
    await asyncio.Event().wait()
    place.close()
    return 0
