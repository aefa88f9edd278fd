"""``cosmos-app replay``: what happened in a run, live or over, on its page or as a list."""

import asyncio
import contextlib
import json
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cosmos_app.errors import DashboardAddressError, DataError
from cosmos_app.event_log import ROUTINE, read_events, tell_event
from cosmos_app.listening import exposure
from cosmos_app.wfm.dashboard.recorded import is_world_model_run, open_world_model_run
from cosmos_core.rundir import RunDirectory
from cosmos_core.serving_config import DashboardConfig

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from cosmos_app.dashboard.server import Feed


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

    is_world_model = is_world_model_run(run_dir)
    run = open_world_model_run(run_dir) if is_world_model else RunDirectory.open(run_dir)
    config = DashboardConfig(host=host, port=port)
    try:
        taken = bind(config)
    except DashboardAddressError as error:
        raise DashboardAddressError(
            f"cannot listen on {host} port {port} ({error.__cause__}); choose another with --port, "
            "any free one without it, or another address with --host"
        ) from error
    token = secrets.token_urlsafe(24)
    if told := exposure(host):
        click.echo(told, err=True)

    def say() -> None:
        click.echo(f"dashboard of {run.name}: {url_of(taken, token)}  (Ctrl-C ends)")

    with contextlib.suppress(KeyboardInterrupt):
        feed, app = (_world_model if is_world_model else _language_model)(run, token)
        asyncio.run(serve(feed, app, taken, started=say))
    return 0


def _language_model(run: RunDirectory, token: str) -> "tuple[Feed, ASGIApp]":
    from cosmos_app.dashboard.api import Served, make_app
    from cosmos_app.dashboard.feed import RunFeed

    feed = RunFeed(run)
    return feed, make_app(Served(feed=feed), token)


def _world_model(run: RunDirectory, token: str) -> "tuple[Feed, ASGIApp]":
    from cosmos_app.wfm.dashboard.api import make_world_model_app
    from cosmos_app.wfm.dashboard.feed import WorldModelFeed

    feed = WorldModelFeed(run, is_live=False)
    return feed, make_world_model_app(feed, token)
