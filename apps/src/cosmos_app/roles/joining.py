"""Waiting for a run that somebody starts on another machine, as SLURM and Kubernetes have it."""

import asyncio
import os
import sys
import time
from pathlib import Path

from cosmos_app.control_files import read_address
from cosmos_app.ended import ended_after
from cosmos_app.errors import RunError
from cosmos_app.kept import KEPT_SINCE
from cosmos_core.bus import Bus, BusUnreachableError
from cosmos_core.errors import CosmosError
from cosmos_core.rundir import RunDirectory

_LOOK_S = 1.0


async def await_run(run_dir: Path, wait_s: float) -> bool:
    """Return when the controller of a run speaks: model, data and addresses are there by then.

    What it said last may be left from before a restart, in a Redis that outlives the run; so it has
    to say something new.

    Returns:
        Whether there is a run to join: not one that ended after this replica was started first, by
        `cosmos_app.kept`, and before it was started again.

    Raises:
        RunError: naming what was missing when ``wait_s`` was over.
    """
    if not wait_s:
        return True
    kept_since = float(os.environ.get(KEPT_SINCE, "inf"))
    deadline = time.monotonic() + wait_s
    first: dict[str, float] = {}
    while missing := await _missing(run_dir, first):
        if ended_after(run_dir, kept_since):
            sys.stderr.write(f"the run in {run_dir} has ended: there is nothing to join\n")
            return False
        if time.monotonic() + _LOOK_S > deadline:
            raise RunError(f"waited {wait_s:g} s for the run in {run_dir}: {missing}")
        await asyncio.sleep(_LOOK_S)
    return True


async def _missing(run_dir: Path, first: dict[str, float]) -> str:
    """Say what is missing; ``first`` keeps when each run of the directory was first heard."""
    try:
        url, namespace = read_address(RunDirectory.open(run_dir))
        async with await Bus.connect(url, namespace, connect_s=2.0, patience_s=2.0) as bus:
            status = await bus.read_status()
    except (BusUnreachableError, RunError, CosmosError) as error:
        return str(error)
    if not status:
        return "its controller has not spoken yet"
    if first.setdefault(namespace, status["time_s"]) == status["time_s"]:
        return "its controller has not spoken since"
    return ""
