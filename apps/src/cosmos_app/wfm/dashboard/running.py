"""The dashboard of a world model's run: a process beside it that ends with it."""

import os
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import click

from cosmos_app.dashboard.config import read_dashboard_config
from cosmos_app.dashboard.process import end_dashboard, start_dashboard
from cosmos_app.errors import DashboardAddressError, DataError
from cosmos_app.listening import exposure
from cosmos_app.parent import die_with_parent
from cosmos_app.wfm.dashboard.recorded import open_world_model_run, recipe_file
from cosmos_core.serving_config import DashboardConfig

_NICENESS = 10
_STANDARD_ERROR = 2


@contextmanager
def served_dashboard(output: Path, config: DashboardConfig, *, as_json: bool) -> Generator[None]:
    """Serve the dashboard of a run while the block runs, if it is wanted; it says its address.

    With ``as_json`` it says that on standard error. That it cannot be served is no reason not to
    train: ``logs/dashboard.log`` says why.
    """
    with ExitStack() as stack:
        if config.enabled:
            with suppress(OSError):
                _start(output, stack, says=_STANDARD_ERROR if as_json else None)
        yield


def _start(output: Path, stack: ExitStack, *, says: int | None) -> None:
    (output / "logs").mkdir(exist_ok=True)
    with (output / "logs" / "dashboard.log").open("ab") as log:
        stack.callback(end_dashboard, start_dashboard(output, log=log, says=says))


async def serve_beside_run(run_dir: Path) -> int:
    """Serve a run's dashboard until the process that trains ends this one.

    Returns:
        0, or 2 if its port or its token cannot be had, which the run does not depend on.
    """
    from cosmos_app.dashboard.address import write_address_file
    from cosmos_app.dashboard.server import open_address, serve
    from cosmos_app.wfm.dashboard.api import make_world_model_app
    from cosmos_app.wfm.dashboard.feed import WorldModelFeed

    die_with_parent()
    os.nice(_NICENESS)
    run = open_world_model_run(run_dir)
    try:
        config = read_dashboard_config(recipe_file(run))
        taken, address = open_address(config, run)
    except (DashboardAddressError, DataError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    feed = WorldModelFeed(run, is_live=True)

    def say() -> None:
        write_address_file(run, address)
        click.echo(f"dashboard: {address.url}")
        if told := exposure(config.host):
            click.echo(told)

    await serve(feed, make_world_model_app(feed, address.token), taken, started=say)
    return 0
