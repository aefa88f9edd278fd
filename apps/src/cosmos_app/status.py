"""``cosmos-app status``: what a run's controller last said of itself, or what its steps say."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cosmos_app.control_files import read_address
from cosmos_app.dashboard.address import read_address_file
from cosmos_app.ended import describe_end, last_words
from cosmos_app.errors import RunError
from cosmos_app.natural_order import by_number
from cosmos_app.output import print_json
from cosmos_app.report import describe_books
from cosmos_app.run_kinds import has_controller, read_tables
from cosmos_app.wfm.dashboard.recorded import (
    is_world_model_run,
    open_world_model_run,
    world_model_status,
)
from cosmos_core.bus import Bus, BusUnreachableError
from cosmos_core.metrics import read_metrics
from cosmos_core.rundir import RunDirectory

_STALE_S = 10.0
_GONE_S = 3.0


async def show_status(run_dir: Path, *, watch: bool, as_json: bool) -> int:
    """Show the status once, or every second until the run has ended, or how it ended; return 0.

    Raises:
        NotARunDirectoryError: if there is no run.
        RunError: if the run was never started, or is gone without a word.
    """
    if is_world_model_run(run_dir):
        trained = open_world_model_run(run_dir)

        async def read_steps() -> Mapping[str, Any]:
            return world_model_status(trained)

        await _show(read_steps, trained, watch=watch, as_json=as_json)
        return 0
    run = RunDirectory.open(run_dir)
    try:
        await _show_live(run, watch=watch, as_json=as_json)
    except BusUnreachableError as error:
        words = last_words(run)
        if not words:
            raise RunError(describe_end(run)) from error
        if as_json:
            print_json(words)
        else:
            console = Console(soft_wrap=True)
            console.print(describe_end(run), markup=False)
            if (run.path / "events.jsonl").exists():
                console.print(f"its dashboard: cosmos-app replay {run.path}", markup=False)
    return 0


async def _show_live(run: RunDirectory, *, watch: bool, as_json: bool) -> None:
    url, namespace = read_address(run)
    connect_s = 1.0 if last_words(run) else _GONE_S  # it may have been started again just now
    tables = read_tables(run)
    async with await Bus.connect(url, namespace, connect_s=connect_s, patience_s=_GONE_S) as bus:

        async def read() -> Mapping[str, Any]:
            said = await bus.read_status()
            return said if has_controller(tables) else _status_of_steps(run, tables)

        await _show(read, run, watch=watch, as_json=as_json)


async def _show(
    read: Callable[[], Awaitable[Mapping[str, Any]]],
    run: RunDirectory,
    *,
    watch: bool,
    as_json: bool,
) -> None:
    status = await read()
    if as_json:
        print_json(status)
    elif not watch:
        Console().print(draw_status(status, time.time()))
        _say_failure(run)
        if address := read_address_file(run):
            Console(soft_wrap=True).print(f"dashboard: {address.url}", markup=False)
    else:
        await _watch(read, status, run)


def _say_failure(run: RunDirectory) -> None:
    """Say that a run has failed whose Redis is still there, where its controller cannot."""
    if "error" in last_words(run):
        Console(soft_wrap=True).print(describe_end(run), markup=False)


def _status_of_steps(run: RunDirectory, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run on given data, which has no controller, has written of its steps."""
    records = read_metrics(run.metrics) if run.metrics.exists() else []
    told = [record for record in records if record.role == "controller"]
    if not told:
        return {}
    last = told[-1]
    return {
        "kind": config["kind"],
        "step": last.step + 1,
        "num_steps": config["trainer"]["steps"],
        "time_s": last.time_s,
        "values": dict(last.values),
    }


async def _watch(
    read: Callable[[], Awaitable[Mapping[str, Any]]], status: Mapping[str, Any], run: RunDirectory
) -> None:
    """Draw the status every second until the run says that it has ended, or its Redis is gone."""
    with Live(draw_status(status, time.time()), auto_refresh=False) as live:
        try:
            while not (status.get("finished") or "error" in last_words(run)):
                await asyncio.sleep(1.0)
                status = await read()
                live.update(draw_status(status, time.time()), refresh=True)
            is_gone = False
        except BusUnreachableError:
            is_gone = True  # it was killed, or its last word went too fast
    _say_failure(run)
    if is_gone and "error" not in last_words(run):
        said = f"{run.path}: its Redis is gone, as when a run has ended"
        Console(soft_wrap=True).print(said, markup=False)


def draw_status(status: Mapping[str, Any], now_s: float) -> Group:
    """Return the status as something to print; ``now_s`` is seconds since the epoch."""
    if not status:
        return Group(Text("nothing has been said yet: the run is being prepared"))
    age_s = now_s - status["time_s"]
    if "values" in status:
        return _draw_steps(status, age_s)
    replicas = Table(
        "replica", "role", "version", "silent for", "new weights", "first group after", ""
    )
    known: Mapping[str, Any] = status.get("replicas", {})
    for name in sorted(known, key=by_number):
        replica = known[name]
        state = "leaving" if replica.get("leaving") else replica.get("last_failure", "")
        first_s = replica.get("first_group_s")
        replicas.add_row(
            name,
            replica["role"],
            str(replica["version"]),
            f"{replica['silent_s']:.1f} s",
            weights_words(replica),
            "" if first_s is None else f"{first_s:.1f} s",
            Text(state),
        )
    books = status.get("books", {})
    lines = [
        Text(f"step {status.get('step')} of {status.get('num_steps')}", style="bold"),
        Text(f"waiting for {status.get('waiting_for')}"),
        Text(f"books, in groups: {describe_books(books)}"),
    ]
    for role, key in (("rollout", "wanted_rollouts"), ("policy", "wanted_policies")):
        if (wanted := status.get(key, -1)) >= 0:
            lines.append(Text(f"{role} replicas wanted: {wanted}"))
    lines.extend(
        Text(f"{name} lost its lease {for_s:.0f} s ago, without progress", style="yellow")
        for name, for_s in status.get("silent", {}).items()
    )
    refused = status.get("refused", {}).values()
    lines.extend(Text(f"refused: {reason}", style="red") for reason in refused)
    if status.get("stopping") and not status.get("finished"):
        lines.append(Text(f"stopping: {status['stopping']}", style="yellow"))
    if age_s > _STALE_S and not status.get("finished"):
        lines.append(Text(f"the controller is silent for {age_s:.0f} s", style="yellow"))
    if status.get("finished"):
        lines.append(Text(f"ended: {status['finished']}", style="green"))
    return Group(*lines, replicas)


def weights_words(replica: Mapping[str, Any]) -> str:
    """Say what a policy's last publication cost it, or when a rollout served its last version."""
    publish_ms, served_s = replica.get("publish_ms"), replica.get("served_s")
    if publish_ms is not None:
        skipped = replica.get("skipped", 0)
        return f"held up {publish_ms:.1f} ms" + (f", {skipped} skipped" if skipped else "")
    return "" if served_s is None else f"served after {served_s:.2f} s"


def _draw_steps(status: Mapping[str, Any], age_s: float) -> Group:
    """Return where a run on given data is, and the figures of its last step."""
    figures = Table.grid(padding=(0, 2))
    for name, value in status["values"].items():
        figures.add_row(name, f"{value:,.6g}")
    return Group(
        Text(f"step {status['step']} of {status['num_steps']}", style="bold"),
        Text(f"the last one ended {age_s:.0f} s ago"),
        figures,
    )
