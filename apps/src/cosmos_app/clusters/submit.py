"""``cosmos-app run --launcher slurm|kubernetes``: write the manifest, hand it to the cluster."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import click

from cosmos_app.cluster_config import LauncherName
from cosmos_app.clusters.kubernetes import jobset_manifest
from cosmos_app.clusters.placement import place
from cosmos_app.clusters.slurm import sbatch_script
from cosmos_app.errors import DataError, RunError
from cosmos_app.recipe import Recipe
from cosmos_core.bus import mask_password

_TOOLS = {"slurm": ("sbatch",), "kubernetes": ("kubectl", "apply", "-f")}
_SUFFIXES = {"slurm": ".sbatch", "kubernetes": ".yaml"}
_SUBMIT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A run for a cluster: its recipe, where that is read from, and with which overrides."""

    recipe: Recipe
    file: Path
    overrides: tuple[str, ...]
    launcher: LauncherName


def render(asked: Submission) -> str:
    """Return the manifest of a run.

    Raises:
        DataError: if the recipe's processes do not fit the machines.
    """
    placement = place(asked.recipe, asked.file, asked.overrides)
    if asked.launcher == "slurm":
        return sbatch_script(placement, asked.recipe.cluster)
    return jobset_manifest(placement, asked.recipe.cluster)


def submit(asked: Submission) -> int:
    """Write the manifest beside the run directory and submit it; return the tool's exit code.

    Raises:
        DataError: if the recipe's processes do not fit the machines.
        RunError: if the cluster's command line tool is not here, or does not answer.
    """
    text, output = render(asked), asked.recipe.output
    path = output.with_name(output.name + _SUFFIXES[asked.launcher])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    tool, *arguments = _TOOLS[asked.launcher]
    if shutil.which(tool) is None:
        raise RunError(f"{tool} is not on this machine; {path} is written: submit it where it is")
    try:
        done = subprocess.run([tool, *arguments, str(path)], timeout=_SUBMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{tool} has not answered in {_SUBMIT_S:g} s; {path} is written") from error
    if not done.returncode:
        click.echo(f"submitted {path}; 'cosmos-app status {output}' shows how it is doing")
    return done.returncode


def run_elsewhere(
    recipe: object,
    file: Path,
    overrides: tuple[str, ...],
    launcher: LauncherName,
    *,
    dry_run: bool,
) -> int:
    """Do what ``run`` does with a launcher other than the local one; return the exit code.

    Raises:
        DataError: if recipes of this kind, or these sizes, are not run on clusters, or an override
            holds a password.
        RunError: if the cluster's command line tool is not here, or does not answer.
    """
    if launcher == "local":
        raise DataError("--dry-run is for clusters; 'cosmos-app check' shows what a run here is")
    if not isinstance(recipe, Recipe):
        raise DataError(f"--launcher {launcher} runs recipes of kind 'rl'; use torchrun for others")
    for path, _, value in (override.partition("=") for override in overrides):
        bare = value.strip(" '\"")
        if mask_password(bare) != bare:
            raise DataError(
                f"{path} holds a password, which everybody could read in the manifest and in lists "
                "of processes: write it into the recipe, a file that only you can read"
            )
    asked = Submission(recipe=recipe, file=file, overrides=overrides, launcher=launcher)
    if dry_run:
        click.echo(render(asked), nl=False)
        return 0
    return submit(asked)
