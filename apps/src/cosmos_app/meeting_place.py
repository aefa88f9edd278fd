"""Where replicas that train, and come and go, meet: in a process that is none of them."""

import asyncio
from pathlib import Path

from cosmos_app.control_files import write_meeting_place
from cosmos_app.errors import RunError
from cosmos_app.parent import die_with_parent
from cosmos_app.recipes import recipe_of_run
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import MeetingPlace


async def run_meeting(run_dir: Path, host: str) -> int:
    """Host the meeting place until a signal ends the process.

    SIGTERM is left to end it at once: a Lighthouse that is shut down waits for its connections, and
    nothing that it knows is worth the wait.

    Raises:
        ConfigError: if the run's recipe is none of this version.
        RunError: if the policy replicas of the run are all there or none is.
    """
    die_with_parent()
    run = RunDirectory.open(run_dir)
    elastic = recipe_of_run(run).elastic
    if elastic is None:
        raise RunError(f"{run.path}: its policy replicas do not come and go; give it [elastic]")
    place = MeetingPlace(elastic, host=host)
    write_meeting_place(run, place.address)
    await asyncio.Event().wait()
    place.close()
    return 0
