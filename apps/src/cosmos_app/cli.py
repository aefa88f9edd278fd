"""The command line: every subcommand parses its arguments and calls one function."""

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cosmos_app.ahead import importing_ahead
from cosmos_app.cluster_config import LauncherName
from cosmos_app.evaluation.command import evaluate
from cosmos_app.guarded import KILLED_RUN
from cosmos_app.guarded import guarded as _guarded
from cosmos_app.looking_commands import doctor, explain, models
from cosmos_app.operating_commands import scale, stop
from cosmos_app.quiet import quiet_third_parties
from cosmos_app.reward_service.commands import reward_service
from cosmos_app.wfm.commands import wfm

_EXAMPLES = """
\b
Examples:
  cosmos-app run configs/quickstart.toml
  cosmos-app run configs/quickstart.toml --rollouts 1 trainer.steps=50
  cosmos-app run configs/quickstart.toml data.path=my.jsonl model.path=my-hf-model
  cosmos-app run configs/quickstart.toml --resume
  cosmos-app check configs/quickstart.toml
  cosmos-app explain rollout.engine
  cosmos-app status runs/quickstart
  cosmos-app evaluate runs/quickstart --url http://127.0.0.1:8000/v1 --model my-model
  cosmos-app scale runs/quickstart --rollouts 3
  cosmos-app stop runs/quickstart
"""

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group(epilog=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cosmos-app")
def main() -> None:
    """Asynchronous RL and fine-tuning of language, vision-language and world models.

    One TOML file is one run. 'run' starts everything on this machine; 'controller', 'policy' and
    'rollout' start one process each, for launchers such as torchrun, SLURM and Kubernetes.
    """
    quiet_third_parties()


for _command in (wfm, reward_service, scale, stop, doctor, explain, models, evaluate):
    main.add_command(_command)


def _recipe_arguments(command: Command) -> Command:
    """Add RECIPE and OVERRIDES, which every command that reads a recipe takes."""
    command = click.argument("overrides", nargs=-1, metavar="[PATH=VALUE]...")(command)
    return click.argument("recipe", type=click.Path(path_type=Path), metavar="RECIPE.toml")(command)


@main.command()
@_recipe_arguments
@click.option("--rollouts", type=click.IntRange(1), help="Shorthand for rollout.replicas=N.")
@click.option("--restarts", type=click.IntRange(0), help="Shorthand for launch.restarts=N.")
@click.option("--output", type=click.Path(path_type=Path), help="Shorthand for output=DIR.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint of that output.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, nothing else.")
@click.option(
    "--launcher",
    type=click.Choice(["local", "slurm", "kubernetes"]),
    default="local",
    show_default=True,
    help="Where: here, or on the machines that the recipe's table [cluster] describes.",
)
@click.option("--dry-run", is_flag=True, help="Print what a cluster would be handed; do nothing.")
def run(  # noqa: PLR0913, click hands every option over by name
    recipe: Path,
    overrides: tuple[str, ...],
    *,
    rollouts: int | None,
    restarts: int | None,
    output: Path | None,
    resume: bool,
    as_json: bool,
    launcher: LauncherName,
    dry_run: bool,
) -> None:
    """Run a recipe to its end, or hand it to a cluster.

    Starts everything on this machine: Redis, controller, policy, rollouts, and a report at the end.
    A recipe with kind = "sft", "preference", "reward_model" or "distillation" at its top trains on
    given data: it has no rollouts. One of kind "wfm_sft" or "wfm_rl" trains a diffusion world model
    in this process, or in torchrun's.

    Where the output directory holds a run already, live or over, this one goes to NAME-2 beside it
    (one of a world model is refused). Ctrl-C finishes the step in hand and writes a checkpoint;
    --resume goes on with the same sample stream. A second Ctrl-C kills.

    PATH=VALUE overrides a key: 'explain' says what keys mean, 'check' what they are in a recipe.

    \b
    Examples:
      cosmos-app run configs/quickstart.toml trainer.steps=50 learner.optimizer.lr=3e-4
      cosmos-app run configs/quickstart.toml staleness.depth=0 staleness.bound=0
      cosmos-app run configs/sft.toml data.path=my.jsonl model.path=my-hf-model
      cosmos-app run configs/quickstart.toml --resume

    Exit codes: 0 done, 1 failed, 2 the recipe or its files are wrong, 3 stopped early, 130 killed.
    """  # noqa: D301, click wants the character itself
    shorthand = {"rollout.replicas": rollouts, "launch.restarts": restarts, "output": output}
    extra = [f"{path}={value}" for path, value in shorthand.items() if value is not None]
    words = (*overrides, *extra)
    with importing_ahead(is_wanted=launcher == "local" and not dry_run) as ahead:
        from cosmos_app.clusters.submit import run_elsewhere
        from cosmos_app.given.launch import run_given_recipe
        from cosmos_app.launcher import run_recipe
        from cosmos_app.recipe import Recipe
        from cosmos_app.recipes import load_any_recipe
        from cosmos_app.wfm.recipe import WfmRecipe

        def start() -> int:
            parsed = load_any_recipe(recipe, words)
            if launcher != "local" or dry_run:
                return run_elsewhere(parsed, recipe, words, launcher, dry_run=dry_run)
            if isinstance(parsed, WfmRecipe):
                from cosmos_app.wfm.running import run_wfm

                if ahead is not None:
                    ahead.close()
                return run_wfm(parsed, resume=resume, as_json=as_json)
            if isinstance(parsed, Recipe):
                return asyncio.run(run_recipe(parsed, ahead, resume=resume, as_json=as_json))
            return asyncio.run(run_given_recipe(parsed, ahead, resume=resume, as_json=as_json))

        _guarded(start, killed=KILLED_RUN)


@main.command()
@_recipe_arguments
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--all", "whole", is_flag=True, help="Show every key of the recipe, as JSON.")
def check(recipe: Path, overrides: tuple[str, ...], *, as_json: bool, whole: bool) -> None:
    """Validate a recipe, start nothing.

    Shows what the recipe says besides defaults, the processes and where they run, the memory of
    weights and optimizer, and whether the admission depth keeps the rollout slots busy.

    Of a world model's recipe: the pipeline's configuration, sizes and frames, adapters, ranks,
    prompts, rewards and data are held against each other; weights are not read.

    A Redis server of one's own (bus.url) is asked whether it would keep the run.

    Exit codes: 0 the recipe can run, 1 its Redis server refuses the password or would lose the run,
    2 the recipe or its files are wrong.
    """
    from cosmos_app.check import check_recipe
    from cosmos_app.given.check import check_given
    from cosmos_app.recipe import Recipe
    from cosmos_app.recipes import load_any_recipe
    from cosmos_app.wfm.forecasting import check_wfm
    from cosmos_app.wfm.recipe import WfmRecipe

    def start() -> int:
        parsed = load_any_recipe(recipe, overrides)
        if isinstance(parsed, WfmRecipe):
            return check_wfm(parsed, as_json=as_json, whole=whole)
        if isinstance(parsed, Recipe):
            return check_recipe(parsed, as_json=as_json, whole=whole)
        return check_given(parsed, as_json=as_json, whole=whole)

    _guarded(start)


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path), default=Path("runs/quickstart"))
@click.option("--watch", is_flag=True, help="Refresh every second until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
def status(run_dir: Path, *, watch: bool, as_json: bool) -> None:
    """Show how a run is doing, or how it ended.

    Step, replicas and their versions, books, and what the run waits for. RUN_DIR is the output of
    the recipe; runs/quickstart when it is not given.
    """
    from cosmos_app.status import show_status

    _guarded(lambda: asyncio.run(show_status(run_dir, watch=watch, as_json=as_json)))


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path), default=Path("runs/quickstart"))
@click.option("--list", "as_list", is_flag=True, help="List the events, serve nothing.")
@click.option("--json", "as_json", is_flag=True, help="List the events as JSON lines.")
@click.option("--all", "with_routine", is_flag=True, help="List every group and step as well.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="0 for any free one.")
def replay(
    run_dir: Path,
    *,
    as_list: bool,
    as_json: bool,
    with_routine: bool,
    host: str,
    port: int,
) -> None:
    """Show what happened in a run, live or over.

    On the dashboard's page, or as a list. RUN_DIR is runs/quickstart when it is not given.

    \b
    Examples:
      cosmos-app replay runs/quickstart          # the page, until Ctrl-C
      cosmos-app replay runs/quickstart --list   # joins, deaths, failures, checkpoints
      cosmos-app replay runs/quickstart --json --all > events.jsonl
    """  # noqa: D301, click wants the character itself
    from cosmos_app.replay import list_events, serve_replay

    if as_list or as_json:
        _guarded(lambda: list_events(run_dir, as_json=as_json, with_routine=with_routine))
    _guarded(lambda: serve_replay(run_dir, host=host, port=port))


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option(
    "--step",
    type=click.IntRange(1),
    help="That after so many steps, as the run counted them; the newest by default.",
)
def export(run_dir: Path, destination: Path, *, step: int | None) -> None:
    """Write a checkpoint as a Hugging Face model.

    Needs no running processes. The directory loads with transformers and with vLLM; an earlier
    export at DESTINATION is replaced, nothing else.
    """
    from cosmos_app.export import export_checkpoint

    _guarded(lambda: export_checkpoint(run_dir, destination, step=step))


def _role_options(command: Command) -> Command:
    """Add what every role takes: the run directory, its name, and where Redis is."""
    command = click.option(
        "--redis",
        "redis_url",
        help="URL of the run's Redis; by default the one the run directory names.",
    )(command)
    return click.argument("run_dir", type=click.Path(path_type=Path))(command)


_wait_option = click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0),
    default=0.0,
    help="Seconds to wait for the run, where somebody else starts it; 0: it is there.",
)


@main.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path, exists=True))
def dashboard(run_dir: Path) -> None:
    """Serve a run's dashboard; its controller starts this process and ends it.

    By hand, use 'replay', which serves the same page.
    """
    from cosmos_app.roles.dashboard import run_dashboard
    from cosmos_app.wfm.dashboard.recorded import is_world_model_run
    from cosmos_app.wfm.dashboard.running import serve_beside_run

    serving = serve_beside_run if is_world_model_run(run_dir) else run_dashboard
    _guarded(lambda: asyncio.run(serving(run_dir)))


@main.command()
@_role_options
@click.option("--name", help="Owner of the lease, which takes it over from one of its name.")
def controller(run_dir: Path, redis_url: str | None, *, name: str | None) -> None:
    """One process: the controller, which decides.

    It never touches a tensor. Takes the controller lease, restores its state from snapshot and log,
    and goes on. A second one waits as a standby until the lease is free.
    """
    from cosmos_app.roles.controller import run_controller

    owner = name or f"controller-{secrets.token_hex(4)}"
    _guarded(lambda: asyncio.run(run_controller(run_dir, redis_url, owner)))


@main.command()
@_role_options
@click.option("--replica", required=True, help="Name of this replica, policy-0 and so on.")
@_wait_option
def policy(run_dir: Path, redis_url: str | None, *, replica: str, wait_s: float) -> None:
    """One process: a rank of a policy, which trains.

    Started by torchrun for more than one rank; rank, world size and rendezvous are read from
    the variables torchrun sets.
    """
    from cosmos_app.roles.joining import await_run
    from cosmos_app.roles.policy import run_policy

    async def start() -> int:
        if not await await_run(run_dir, wait_s):
            return 0
        return await run_policy(run_dir, redis_url, replica)

    _guarded(lambda: asyncio.run(start()))


@main.command()
@_role_options
@click.option("--replica", required=True, help="Name of this replica, rollout-0 and so on.")
@_wait_option
def rollout(run_dir: Path, redis_url: str | None, *, replica: str, wait_s: float) -> None:
    """One process: a rollout, which generates and scores.

    May join and leave a running run at any time; it is given the newest weights first.
    """
    from cosmos_app.roles.joining import await_run
    from cosmos_app.roles.rollout import run_rollout

    async def start() -> int:
        if not await await_run(run_dir, wait_s):
            return 0
        return await run_rollout(run_dir, redis_url, replica)

    _guarded(lambda: asyncio.run(start()))


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--replica", required=True, help="Name of this replica, teacher-0 and so on.")
@_wait_option
def teacher(run_dir: Path, *, replica: str, wait_s: float) -> None:
    """One process: a teacher, which scores samples.

    Rollouts go on meanwhile. They find it by the run directory, whenever it comes and wherever it
    listens.
    """
    from cosmos_app.roles.joining import await_run
    from cosmos_app.roles.teacher import run_teacher

    async def start() -> int:
        if not await await_run(run_dir, wait_s):
            return 0
        return await run_teacher(run_dir, replica)

    _guarded(lambda: asyncio.run(start()))


@main.command()
@_role_options
@click.option("--replica", required=True, help="Name of this replica, policy-0 and so on.")
def learner(run_dir: Path, redis_url: str | None, *, replica: str) -> None:
    """One process: a rank of a run on given data.

    It trains, and nothing is generated. Started by torchrun for more than one rank. Of several
    replicas any may die and come back.
    """
    from cosmos_app.given.role import run_learner

    _guarded(lambda: asyncio.run(run_learner(run_dir, redis_url, replica)))


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--host",
    envvar="COSMOS_HOST",
    default="127.0.0.1",
    show_default=True,
    help="Where replicas reach it.",
)
def meeting(run_dir: Path, *, host: str) -> None:
    """One process: where elastic replicas meet.

    Replicas that come and go agree there, before each step, on who takes it.
    """
    from cosmos_app.meeting_place import run_meeting

    _guarded(lambda: asyncio.run(run_meeting(run_dir, host)))


@main.command()
@_role_options
def warmup(run_dir: Path, redis_url: str | None) -> None:
    """One process: the warm-up of a built model.

    Fine-tunes the freshly built model of a run on its own data before RL starts.
    """
    from cosmos_app.roles.warmup import run_warmup

    _guarded(lambda: asyncio.run(run_warmup(run_dir, redis_url)))
