"""``cosmos-app wfm``: what is only asked of diffusion pipelines."""

from pathlib import Path

import click

from cosmos_app.guarded import guarded


@click.group()
def wfm() -> None:
    """Diffusion world models: check a pipeline, train one from a recipe."""


@wfm.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--adapter", default="", help="module:Class of an adapter of your own.")
@click.option("--json", "as_json", is_flag=True, help="Print the points as JSON.")
def check(model: Path, *, adapter: str, as_json: bool) -> None:
    """Check that a pipeline directory can be trained, in five points.

    Class name, components, shapes of embeddings, one SFT forward, and one rollout step with the RL
    forward that belongs to it. Exit code 0 when all pass, 1 otherwise.
    """
    from cosmos_app.wfm.checking import check_pipeline

    guarded(lambda: check_pipeline(model, adapter=adapter, as_json=as_json))


@wfm.command()
@click.argument("recipe", type=click.Path(path_type=Path), metavar="RECIPE.toml")
@click.argument("overrides", nargs=-1, metavar="[PATH=VALUE]...")
def run(recipe: Path, overrides: tuple[str, ...]) -> None:
    """Train by a recipe of kind wfm_sft or wfm_rl, in this process or in torchrun's.

    The last line names the directory that diffusers loads. 'cosmos-app run' does the same.
    """
    from cosmos_app.wfm.running import load_wfm_recipe, run_wfm

    guarded(lambda: run_wfm(load_wfm_recipe(recipe, overrides)))
