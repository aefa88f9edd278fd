"""``cosmos-app replay``: what happened in a run, live or over, on its page or as a list."""

import asyncio
import contextlib
import json
import secrets
import time
from pathlib import Path

import click

from cosmos_app.dashboard.config import DashboardConfig
from cosmos_app.errors import DataError
from cosmos_app.event_log import ROUTINE, read_events, tell_event
from cosmos_app.listening import exposure
from cosmos_core.rundir import RunDirectory


def list_events(run_dir: Path, *, as_json: bool, with_routine: bool) -> int:
    """Print the events of a run, oldest first; return 0.

    Raises:
        NotARunDirectoryError: if there is no run.
        DataError: if it recorded no events.
    """
    path = RunDirectory.open(run_dir).path / "events.jsonl"
    if not path.exists():
        raise DataError(
            f"{run_dir} has no events.jsonl: a supervised run, one of an older version, or one "
            "whose controller never started"
        )
    for event in read_events(path):
        if not with_routine and event["type"] in ROUTINE:
            continue
        if as_json:
            click.echo(json.dumps(event, ensure_ascii=False))
        else:
            moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time_s"]))
            replica = event.get("replica", "")
            click.echo(f"{moment}  {replica:<12} {tell_event(event)}")
    return 0


def serve_replay(run_dir: Path, *, host: str, port: int) -> int:
    """Serve the page of a run until Ctrl-C, with a token of its own; return 0.

    Raises:
        NotARunDirectoryError: if there is no run.
        DashboardAddressError: if the port cannot be had.
    """
    from cosmos_app.dashboard.server import bind, serve, url_of

    run = RunDirectory.open(run_dir)
    config = DashboardConfig(host=host, port=port)
    taken = bind(config)
    token = secrets.token_urlsafe(24)
    if told := exposure(host):
        click.echo(told, err=True)

    def say() -> None:
        click.echo(f"dashboard of {run.name}: {url_of(taken, token)}  (Ctrl-C ends)")

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(run, taken, token, started=say))
    return 0
