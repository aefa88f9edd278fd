"""``cosmos-app stop`` and ``scale``: what somebody asks of the controller of a run, over HTTP.

The controller's API, which its token opens, is asked; where a recipe serves none, the run's Redis.
"""

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from cosmos_app.control_files import read_address
from cosmos_app.dashboard.address import ADDRESS_FILE, read_address_file
from cosmos_app.ended import describe_end
from cosmos_app.errors import RunError
from cosmos_app.given.stop_file import ask_to_stop
from cosmos_app.run_kinds import has_controller, read_tables
from cosmos_core.bus import Bus, BusUnreachableError
from cosmos_core.messages import Event, ScaleRequested, StopRequested
from cosmos_core.rundir import RunDirectory

STOP_REASON = "cosmos-app stop"
_ANSWER_S = 10.0
_LOOK_S = 0.5
_MOST_DETAIL = 1 << 16
_OF_STRANGERS = frozenset({401, 403, 404, 405, 501})


async def stop_run(run_dir: Path, *, wait_s: float) -> int:
    """Ask a run to end after the step in hand, with a checkpoint; wait for that; return 0.

    Raises:
        NotARunDirectoryError: if there is no run.
        RunError: if it was never started, is not running, or has not ended in ``wait_s``.
    """
    run = RunDirectory.open(run_dir)
    await _ask(run, "stop", {"reason": STOP_REASON}, StopRequested(reason=STOP_REASON))
    Console(soft_wrap=True).print(f"{run.path}: asked to stop after the step in hand", markup=False)
    if wait_s:
        step = await _ended(run, wait_s)
        at = f" at step {step}" if step else ""
        Console(soft_wrap=True).print(f"{run.path}: stopped{at}; go on with --resume", markup=False)
    return 0


async def scale_run(run_dir: Path, wanted: Mapping[str, int]) -> int:
    """Ask for a number of replicas of a kind, "rollouts" or "policies"; return 0.

    Raises:
        NotARunDirectoryError: if there is no run.
        RunError: if it was never started or is not running, or its policy replicas are fixed.
    """
    run = RunDirectory.open(run_dir)
    if "policies" in wanted and read_tables(run).get("elastic") is None:
        raise RunError(
            f"{run.path}: its policy replicas sum gradients as they are; give the recipe [elastic] "
            "for replicas that come and go"
        )
    await _ask(run, "scale", wanted, ScaleRequested(**wanted))
    said = " and ".join(f"{n} {kind}" for kind, n in wanted.items())
    Console(soft_wrap=True).print(
        f"{run.path}: {said} are wanted; see 'cosmos-app status'", markup=False
    )
    return 0


async def _ask(run: RunDirectory, route: str, query: Mapping[str, Any], event: Event) -> None:
    url, namespace = read_address(run)
    try:
        async with await Bus.connect(url, namespace, connect_s=3.0, patience_s=_ANSWER_S) as bus:
            status = await bus.read_status()
            if status.get("finished"):
                raise RunError(f"{run.path} has ended: {status['finished']}")
            if not has_controller(read_tables(run)):
                if route != "stop":
                    raise RunError(
                        f"{run.path}: a run on given data has the replicas it began with"
                    )
                ask_to_stop(run)
            elif not await asyncio.to_thread(_post, run, route, query):
                await bus.send_event(event)
    except BusUnreachableError as error:
        raise RunError(describe_end(run)) from error


def _post(run: RunDirectory, route: str, query: Mapping[str, Any]) -> bool:
    """Ask the API of a run's controller; tell whether there was one that answers."""
    address = read_address_file(run)
    if address is None:
        return False
    base = address.url.partition("?")[0]
    request = urllib.request.Request(
        f"{base}api/{route}?{urllib.parse.urlencode(query)}",
        method="POST",
        headers={"Authorization": f"Bearer {address.token}"},
    )
    # no proxy from the environment, which would be told the token
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=_ANSWER_S):
            return True
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection
            said = f"{base}api/{route} answers {error.code}: {_detail(error)}"
        raise RunError(f"{said}{_advice(run) if error.code in _OF_STRANGERS else ''}") from error
    except http.client.HTTPException as error:
        raise RunError(f"{base}api/{route} does not answer in HTTP{_advice(run)}") from error
    except OSError:
        return False


def _detail(error: urllib.error.HTTPError) -> str:
    """Return why our API refused something, or what the code of the answer means."""
    try:
        found = json.loads(error.read(_MOST_DETAIL))["detail"]
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return error.reason
    return found if isinstance(found, str) else error.reason


def _advice(run: RunDirectory) -> str:
    """Say what to do where somebody else may listen, who is told nothing more."""
    holder = run.holder()
    by_signal = f", or SIGTERM to {holder}, stops it" if holder else " stops it"
    return (
        f"; {run.path / ADDRESS_FILE} names that address, which another run or program may have by "
        f"now, and the run is asked nowhere else: Ctrl-C where it was started{by_signal}"
    )


async def _ended(run: RunDirectory, wait_s: float) -> int:
    """Wait for the end of a run; return the step it is at."""
    url, namespace = read_address(run)
    deadline, status = time.monotonic() + wait_s, dict[str, Any]()
    while time.monotonic() < deadline:
        try:
            async with await Bus.connect(url, namespace, connect_s=1.0, patience_s=1.0) as bus:
                status = await bus.read_status()
        except BusUnreachableError:
            return status.get("step", 0)  # its server went with it
        if status.get("finished"):
            return status["step"]
        await asyncio.sleep(_LOOK_S)
    raise RunError(
        f"{run.path} has not ended in {wait_s:g} s; it waits for {status.get('waiting_for')}"
    )
