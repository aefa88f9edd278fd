"""A recipe of a world model, run in this process or in the ranks that torchrun started."""

import os
import time
import tomllib
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import click
import torch
from rich.console import Console

from cosmos_app.dashboard.server import check_address
from cosmos_app.errors import DataError, InterruptedRunError
from cosmos_app.frame import hand_in
from cosmos_app.progress_watch import ProgressWatch
from cosmos_app.roles.process import stay_on_loopback, torchrun_place
from cosmos_app.roles.ranks import join_ranks
from cosmos_app.settings import bad_steps_kept
from cosmos_app.shown_recipe import shown_as_json, shown_recipe
from cosmos_app.wfm.dashboard.running import served_dashboard
from cosmos_app.wfm.disaggregated.running import remote_rollouts
from cosmos_app.wfm.figures import RunFigures
from cosmos_app.wfm.joining import join_mesh
from cosmos_app.wfm.object_store import use_object_store
from cosmos_app.wfm.recipe import WFM_KINDS, WfmRecipe
from cosmos_app.wfm.report import print_world_model_report, world_model_report
from cosmos_app.wfm.rewarding import reward_client, validation_scorer
from cosmos_app.wfm.stopping import stop_requests
from cosmos_core.config import load_config
from cosmos_core.metrics import FanOut, SinkContext, open_sinks
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import (
    TrainingMesh,
    build_mesh,
    shutdown_distributed,
)
from cosmos_wfm import (
    DiffusionRl,
    DiffusionRlConfig,
    DiffusionSftConfig,
    RewardClient,
    RunControl,
    RunOutputs,
    SampleScorer,
    TrainingStoppedError,
    ValidationHooks,
    check_files,
    check_is_new,
    fill_cache,
    take_rl_steps,
    train_sft,
)

KINDS_TEXT = ", ".join(WFM_KINDS)
_WORK = "a part of its work (stall_s, and what it may wait for; --resume goes on)"


def load_wfm_recipe(path: Path, overrides: Sequence[str] = ()) -> WfmRecipe:
    """Read a recipe of a world model.

    Raises:
        DataError: if the file cannot be read, or is of another kind.
        ConfigError: if it is not a recipe of its kind, with every problem in it.
    """
    try:
        kind = tomllib.loads(path.read_text(encoding="utf-8-sig")).get("kind")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as TOML: {error}") from error
    if not isinstance(kind, str) or kind not in WFM_KINDS:
        raise DataError(f"{path} is no recipe of a world model: kind is none of {KINDS_TEXT}")
    return load_config(WFM_KINDS[kind], path, overrides)


def run_wfm(recipe: WfmRecipe, *, resume: bool = False, as_json: bool = False) -> int:
    """Train to the end; return 0. Figures go to ``<output>/metrics.jsonl`` and, shorter, are shown.

    A report is written to ``<output>/report.json``, and shown. The last line that is printed is
    the directory that diffusers loads.

    Args:
        recipe: what to train.
        resume: go on from the newest checkpoint of its output, if there is one.
        as_json: print the report as JSON, and nothing else to standard output.

    Raises:
        DataError: if the dashboard's token cannot be read.
        DashboardAddressError: if the dashboard's port cannot be had.
        InterruptedRunError: if Ctrl-C or SIGTERM stopped it, with a checkpoint.
    """
    first = torchrun_place().rank == 0
    if first:
        check_address(recipe.dashboard)
    use_object_store(os.environ)
    with _watch_work(recipe) as watch:
        told = partial(watch.at, _WORK)
        mesh = join_mesh(recipe.parallel, recipe.compute)
        try:
            directory = train(recipe, mesh, told, resume=resume, as_json=as_json)
        except TrainingStoppedError as error:
            if first:
                _report(recipe, "", as_json=as_json)
            raise InterruptedRunError(str(error)) from error
        finally:
            shutdown_distributed()
    if first:
        _report(recipe, str(directory), as_json=as_json)
        click.echo(str(directory), err=as_json)
    return 0


def _report(recipe: WfmRecipe, export: str, *, as_json: bool) -> None:
    run = RunDirectory(Path(recipe.output).absolute(), time.time(), None)
    report = world_model_report(run.path, num_steps=recipe.num_steps, export=export)
    console = Console(stderr=as_json)
    show = partial(print_world_model_report, report, console)
    hand_in(asdict(report), run, show, as_json=as_json)


def cache_wfm(recipe: WfmRecipe) -> int:
    """Encode what the recipe's cache does not have; return 0.

    Raises:
        DataError: if it is no recipe of fine-tuning.
    """
    if not isinstance(recipe, DiffusionSftConfig):
        raise DataError(f"kind is {recipe.kind}; only recipes of kind wfm_sft have a cache")
    use_object_store(os.environ)
    stay_on_loopback()
    first = torchrun_place().rank == 0
    with _watch_work(recipe) as watch:

        def show(done: int, total: int) -> None:
            watch.at(_WORK if done < total else "")  # who is ready may wait for the others
            if first:
                click.echo(f"{done} of {total} samples", err=True)

        mesh = build_mesh(recipe.parallel, join_ranks(torchrun_place()))
        try:
            encoded, share = fill_cache(recipe, mesh=mesh, on_part=show)
            counts = mesh.sum_(torch.tensor([encoded, share], device=mesh.process.device)).tolist()
        finally:
            shutdown_distributed()
    if first:
        click.echo(f"{counts[0]} samples encoded, {counts[1] - counts[0]} were there")
    return 0


def train(
    recipe: WfmRecipe,
    mesh: TrainingMesh,
    told: Callable[[], None] | None = None,
    *,
    resume: bool = False,
    as_json: bool = False,
) -> Path:
    """Run a recipe on a mesh; every rank calls. Rank 0 writes the recipe and the figures.

    With ``as_json`` nothing is said on standard output. ``told`` is called while it gets further.
    """
    # before anything is written, and loggers open a run somewhere
    check_files(recipe)
    client = reward_client(recipe) if isinstance(recipe, DiffusionRlConfig) else nullcontext()
    with client as rewards:
        if not resume:
            check_is_new(RunOutputs.of(recipe), mesh)
        return _train(recipe, mesh, rewards, told, resume=resume, as_json=as_json)


def _train(
    recipe: WfmRecipe,
    mesh: TrainingMesh,
    rewards: RewardClient | None,
    told: Callable[[], None] | None,
    *,
    resume: bool,
    as_json: bool,
) -> Path:
    output = Path(recipe.output)
    first = mesh.process.rank == 0
    if first:
        output.mkdir(parents=True, exist_ok=True)
        (output / "recipe.json").write_text(shown_as_json(recipe), encoding="utf-8")
    draws = isinstance(recipe, DiffusionRlConfig) and recipe.disaggregated is None
    recipe = replace(recipe, learner=bad_steps_kept(recipe.learner, output, keep=True))
    with (
        closing(_sinks(recipe) if first else FanOut(())) as sinks,
        served_dashboard(output, recipe.dashboard, as_json=as_json) if first else nullcontext(),
        stop_requests(says=first) as stopping,
        validation_scorer(recipe, draws=draws) as scorer,
    ):
        say = partial(click.echo, err=as_json)
        watch = partial(_watch_saving, recipe, mesh)
        control = RunControl(stopping=stopping, while_writing=watch, told=told)
        figures = RunFigures(output, recipe.num_steps, sinks, writes=first, say=say)
        if isinstance(recipe, DiffusionSftConfig):
            return train_sft(
                recipe,
                mesh=mesh,
                resume=resume,
                on_step=figures.write,
                validation=ValidationHooks(told=figures.show, scorer=scorer),
                control=control,
            )
        with _rl_run(recipe, mesh, rewards, scorer) as run:
            return take_rl_steps(
                run,
                resume=resume,
                on_step=figures.write,
                on_validation=figures.show,
                control=control,
            )


@contextmanager
def _watch_work(recipe: WfmRecipe) -> Generator[ProgressWatch]:
    """End this process if it gets no further, inside the block, for longer than it may wait."""
    waits_s = [recipe.save_s]
    if recipe.validation is not None:
        waits_s.append(recipe.validation.deadline_s)
    if isinstance(recipe, DiffusionRlConfig):
        waits_s.append(recipe.samples_deadline_s)
    with ProgressWatch(f"rank {torchrun_place().rank}", recipe.stall_s + max(waits_s)) as watch:
        watch.at(_WORK)
        yield watch


@contextmanager
def _watch_saving(recipe: WfmRecipe, mesh: TrainingMesh) -> Generator[None]:
    """End this process if it takes longer to write than it may, inside the block."""
    with ProgressWatch(f"rank {mesh.process.rank}", recipe.save_s) as watch:
        watch.at(f"writing for {recipe.output} (save_s; --resume goes on from a checkpoint)")
        yield


@contextmanager
def _rl_run(
    recipe: DiffusionRlConfig,
    mesh: TrainingMesh,
    rewards: RewardClient | None,
    held_out: SampleScorer | None,
) -> Generator[DiffusionRl]:
    """Give a run with what draws for it, which ends with the block."""
    with remote_rollouts(recipe, mesh) as remote:
        own = rewards if remote is None else None  # replicas have clients of their own
        yield DiffusionRl(recipe, mesh=mesh, scorer=own, remote=remote, held_out=held_out)


def _sinks(recipe: WfmRecipe) -> FanOut:
    run = RunDirectory(Path(recipe.output).absolute(), time.time(), None)
    context = SinkContext(
        run=run,
        num_steps=recipe.num_steps,
        console=Console(),
        config=shown_recipe(recipe),
    )
    return open_sinks(recipe.loggers, context)
