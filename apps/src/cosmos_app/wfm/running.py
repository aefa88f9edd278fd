"""A recipe of a world model, run in this process or in the ranks that torchrun started."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from cosmos_app.errors import DataError
from cosmos_app.roles.process import torchrun_place
from cosmos_app.roles.ranks import join_ranks
from cosmos_app.wfm.disaggregated.running import remote_rollouts
from cosmos_app.wfm.recipe import WFM_KINDS, WfmRecipe
from cosmos_app.wfm.rewarding import reward_client
from cosmos_core.config import config_to_json, load_config
from cosmos_parallel import (
    StepReport,
    TrainingMesh,
    build_mesh,
    shutdown_distributed,
)
from cosmos_wfm import DiffusionRl, DiffusionSftConfig, take_rl_steps, train_rl, train_sft

KINDS_TEXT = ", ".join(WFM_KINDS)


def load_wfm_recipe(path: Path, overrides: Sequence[str] = ()) -> WfmRecipe:
    """Read a recipe of a world model.

    Raises:
        DataError: if the file cannot be read, or is of another kind.
        ConfigError: if it is not a recipe of its kind, with every problem in it.
    """
    try:
        kind = tomllib.loads(path.read_text(encoding="utf-8")).get("kind")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as TOML: {error}") from error
    if not isinstance(kind, str) or kind not in WFM_KINDS:
        raise DataError(f"{path} is no recipe of a world model: kind is none of {KINDS_TEXT}")
    return load_config(WFM_KINDS[kind], path, overrides)


def run_wfm(recipe: WfmRecipe, *, resume: bool = False) -> int:
    """Train to the end; return 0. Figures go to ``<output>/metrics.jsonl`` and, shorter, are shown.

    The last line that is printed is the directory that diffusers loads.

    Args:
        recipe: what to train.
        resume: go on from the newest checkpoint of its output, if there is one.
    """
    mesh = build_mesh(recipe.parallel, join_ranks(torchrun_place()))
    try:
        directory = train(recipe, mesh, resume=resume)
    finally:
        shutdown_distributed()
    if mesh.process.rank == 0:
        click.echo(str(directory))
    return 0


def check_wfm(recipe: WfmRecipe) -> int:
    """Print the resolved recipe; return 0. What can be wrong with one is found by reading it."""
    click.echo(config_to_json(recipe))
    return 0


def train(recipe: WfmRecipe, mesh: TrainingMesh, *, resume: bool = False) -> Path:
    """Run a recipe on a mesh; every rank calls. Rank 0 writes the recipe and the figures."""
    output = Path(recipe.output)
    if mesh.process.rank == 0:
        output.mkdir(parents=True, exist_ok=True)
        (output / "recipe.json").write_text(config_to_json(recipe), encoding="utf-8")

    metrics = output / "metrics.jsonl"
    first: list[int] = []

    def write(step: int, report: StepReport, figures: Mapping[str, float]) -> None:
        if mesh.process.rank:
            return
        if not first:
            first.append(step)
            keep_before(metrics, step)
        row = {"step": step, **_figures(report), **figures}
        with metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        reward = f"  reward {figures['reward']:.4f}" if "reward" in figures else ""
        click.echo(f"step {step}/{recipe.num_steps}  loss {report.loss:.4f}{reward}")

    if isinstance(recipe, DiffusionSftConfig):
        return train_sft(
            recipe,
            mesh=mesh,
            resume=resume,
            on_step=lambda step, report: write(step, report, {}),
        )
    with remote_rollouts(recipe, mesh) as remote:
        if remote is not None:
            run = DiffusionRl(recipe, mesh=mesh, remote=remote)
            return take_rl_steps(run, resume=resume, on_step=write)
        with reward_client(recipe) as scorer:
            return train_rl(recipe, mesh=mesh, scorer=scorer, resume=resume, on_step=write)


def keep_before(metrics: Path, step: int) -> None:
    """Drop the rows of steps that are taken again, and one that was cut off."""
    if not metrics.exists():
        return
    whole = metrics.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    kept = [row for row in whole if json.loads(row)["step"] < step]
    metrics.write_text("".join(f"{row}\n" for row in kept), encoding="utf-8")


def _figures(report: StepReport) -> dict[str, float]:
    plain = asdict(report)
    figures = {name: float(plain[name]) for name in ("loss", "grad_norm", "lr", "seconds")}
    means = {
        name: report.mean(name, over="samples") for name in report.metrics if name != "samples"
    }
    return {**figures, **means}
