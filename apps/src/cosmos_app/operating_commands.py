"""``cosmos-app stop`` and ``scale``, on the command line."""

import asyncio
from pathlib import Path

import click

from cosmos_app.guarded import guarded

_RUN = click.Path(path_type=Path, exists=True)
_MOST = 100_000  # as the API has it


@click.command()
@click.argument("run_dir", type=_RUN)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0),
    default=300.0,
    show_default=True,
    help="Seconds to wait for the end; 0 returns at once.",
)
def stop(run_dir: Path, *, wait_s: float) -> None:
    """End a run cleanly, from anywhere.

    The step in hand is finished and a checkpoint written. Asks the controller over its HTTP API,
    with the token of the run directory. The run goes on with 'cosmos-app run ... --resume'.
    """
    from cosmos_app.operations import stop_run

    guarded(lambda: asyncio.run(stop_run(run_dir, wait_s=wait_s)))


@click.command()
@click.argument("run_dir", type=_RUN)
@click.option("--rollouts", type=click.IntRange(0, _MOST), help="How many are to generate.")
@click.option("--policies", type=click.IntRange(1, _MOST), help="How many are to train.")
def scale(run_dir: Path, *, rollouts: int | None, policies: int | None) -> None:
    """Change the number of replicas of a live run.

    New rollouts generate as soon as they have the newest weights; of too many, the last to come
    finish the groups they hold and leave. Policies, of recipes with [elastic], join with the next
    step and leave after one. On a cluster, start the new ones yourself:

    \b
    Examples:
      cosmos-app scale runs/quickstart --rollouts 4
      cosmos-app rollout runs/quickstart --replica rollout-4   # where that directory is seen
    """  # noqa: D301, click wants the character itself
    from cosmos_app.operations import scale_run

    if rollouts is None and policies is None:
        raise click.UsageError("say how many: --rollouts, --policies or both")
    wanted = {
        kind: number
        for kind, number in (("rollouts", rollouts), ("policies", policies))
        if number is not None
    }
    guarded(lambda: asyncio.run(scale_run(run_dir, wanted)))
