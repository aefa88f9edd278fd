"""``cosmos-app export``: a checkpoint of a run as a Hugging Face model directory."""

from pathlib import Path

from rich.console import Console

from cosmos_app.errors import NothingToResumeError
from cosmos_app.prepare import run_files
from cosmos_app.recipe import Recipe
from cosmos_core.config import config_from_json
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import (
    CheckpointStore,
    Learner,
    ParallelConfig,
    build_mesh,
    export_hf,
    load_causal_lm,
)


def export_checkpoint(run_dir: Path, destination: Path, *, step: int | None) -> int:
    """Write one checkpoint of a run, whatever layout it was trained in; return 0.

    Raises:
        NotARunDirectoryError: if there is no run.
        NothingToResumeError: if the run has no such checkpoint.
        ExportError: if the destination cannot be written.
    """
    run = RunDirectory.open(run_dir)
    recipe = config_from_json(Recipe, run.config.read_text())
    files = run_files(recipe, run.path)
    mesh = build_mesh(ParallelConfig())
    store = CheckpointStore(run.checkpoints, mesh)
    steps = store.steps()
    if not steps or (step is not None and step not in steps):
        there = ", ".join(map(str, steps)) or "none"
        raise NothingToResumeError(f"{run.path} has no checkpoint of step {step}; it has: {there}")
    model = load_causal_lm(files.model, mesh, recipe.model.training)
    checkpoint = store.load(Learner(model, recipe.learner, mesh=mesh), step)
    export_hf(model, destination, mesh, tokenizer_dir=files.model)
    Console().print(f"step {checkpoint.step} of {run.path} is in {destination}")
    return 0
