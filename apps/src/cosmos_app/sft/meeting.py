"""The meeting place of a run's replicas, in a process that is none of them."""

import asyncio
import contextlib
import signal
from pathlib import Path

from cosmos_app.errors import RunError
from cosmos_app.recipes import recipe_of_run
from cosmos_app.roles.parent import die_with_parent
from cosmos_app.sft.files import write_meeting_place
from cosmos_app.sft.recipe import SftRecipe
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import MeetingPlace


async def run_meeting(run_dir: Path, host: str) -> int:
    """Host the meeting place until SIGTERM; return 0.

    Raises:
        RunError: if the run is no supervised one.
    """
    die_with_parent()
    run = RunDirectory.open(run_dir)
    recipe = recipe_of_run(run)
    if not isinstance(recipe, SftRecipe):
        raise RunError(f"{run_dir} is a run of kind {recipe.kind!r}; its replicas meet elsewhere")
    place = MeetingPlace(recipe.elastic, host=host)
    write_meeting_place(run, place.address)
    asked = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, asked.set)
    with contextlib.closing(place):
        await asked.wait()
    return 0
