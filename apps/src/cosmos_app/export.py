"""``cosmos-app export``: a checkpoint of a run as a Hugging Face model directory."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from cosmos_app.checkpoint_places import checkpoints_of
from cosmos_app.errors import DataError, NothingToResumeError
from cosmos_app.exporting import export_trained
from cosmos_app.given.classifier import export_classifier
from cosmos_app.given.files import model_of
from cosmos_app.given.recipe import RewardModelRecipe
from cosmos_app.held import held_training
from cosmos_app.prepare import run_files
from cosmos_app.recipe import Recipe
from cosmos_app.recipes import TokenRecipe, recipe_of_run
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import (
    CheckpointStore,
    Learner,
    ParallelConfig,
    build_mesh,
    chosen_implementation,
    load_causal_lm,
    read_config,
)
from cosmos_parallel import ModelConfig as HeldModelConfig


def export_checkpoint(run_dir: Path, destination: Path, *, step: int | None) -> int:
    """Write one checkpoint of a run, whatever layout it was trained in; return 0.

    Args:
        run_dir: the run.
        destination: where to.
        step: after how many steps it was saved; the newest when ``None``.

    Raises:
        NotARunDirectoryError: if there is no run.
        DataError: if something that is no model lies at the destination.
        NothingToResumeError: if the run has no such checkpoint.
        ExportError: if the destination cannot be written.
    """
    run = RunDirectory.open(run_dir)
    _refuse_to_replace(destination)
    recipe = recipe_of_run(run)
    of_rl = isinstance(recipe, Recipe)
    start = run_files(recipe, run.path).model if of_rl else model_of(recipe, run)
    mesh = build_mesh(ParallelConfig())
    store = CheckpointStore(checkpoints_of(recipe.trainer, run), mesh)
    counts = [saved + 1 for saved in store.steps()]
    if not counts:
        raise NothingToResumeError(f"{run.path} has no checkpoint yet")
    if step is not None and step not in counts:
        there = ", ".join(map(str, counts))
        raise NothingToResumeError(f"{run.path} has no checkpoint of step {step}; it has: {there}")
    held = _held_by_one(recipe, start)
    model = load_causal_lm(start, mesh, held)
    learner = Learner(model, recipe.learner, mesh=mesh)
    checkpoint = store.load(learner, None if step is None else step - 1)
    write = export_classifier if isinstance(recipe, RewardModelRecipe) else export_trained
    dtype = None if isinstance(recipe, Recipe) else recipe.trainer.export_dtype
    with learner.averaged():
        write(model, destination, mesh, base=start, training=held, dtype=dtype)
    Console(soft_wrap=True).print(
        f"step {checkpoint.step + 1} of {run.path} is in {destination}", markup=False
    )
    return 0


def _held_by_one(recipe: TokenRecipe, start: Path) -> HeldModelConfig:
    """Return how one process holds, under the same names, what the ranks of a run held.

    It computes nothing, so it needs neither another type to compute in nor hardware for it.
    """
    training = held_training(recipe)
    parallel = recipe.policy.parallel.resolve(recipe.policy.ranks)
    return replace(
        training,
        implementation=chosen_implementation(read_config(start), training, parallel),
        compute_dtype=training.dtype,
        low_precision=None,
        compile="none",
    )


def _refuse_to_replace(destination: Path) -> None:
    """Look whether what an export takes away is nothing, or an earlier model."""
    if not destination.exists():
        return
    is_directory = destination.is_dir()
    others = sorted(path.name for path in destination.iterdir()) if is_directory else []
    if not is_directory or (others and "config.json" not in others):
        holds = f"holds {others[0]}" if others else "is a file"
        raise DataError(
            f"{destination} {holds} and is no model of an earlier export, which alone would be "
            "replaced: name another directory"
        )
