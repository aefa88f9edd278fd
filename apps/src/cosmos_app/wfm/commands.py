"""``cosmos-app wfm``: what is only asked of diffusion pipelines."""

import signal
from pathlib import Path

import click

from cosmos_app.guarded import KILLED_RUN, guarded
from cosmos_app.parent import die_with_parent
from cosmos_app.quiet import silence_loading


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
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint of that output.")
def run(recipe: Path, overrides: tuple[str, ...], *, resume: bool) -> None:
    """Train by a recipe of kind wfm_sft or wfm_rl, in this process or in torchrun's.

    The last line names the directory that diffusers loads. 'cosmos-app run' does the same.
    """
    from cosmos_app.wfm.running import load_wfm_recipe, run_wfm

    guarded(lambda: run_wfm(load_wfm_recipe(recipe, overrides), resume=resume), killed=KILLED_RUN)


@wfm.command()
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--deadline-s", default=1800.0, show_default=True, help="For the run to be there.")
@click.option("--child", default="", hidden=True, help="Its name; it ends with its parent.")
def rollout(output: Path, *, deadline_s: float, child: str) -> None:
    """Draw samples for a run with a table [disaggregated] that writes to OUTPUT.

    The run starts its replicas itself unless disaggregated.start = false. This adds one, at any
    time, on any machine that sees the directory; what it was drawing when it is ended is given to
    another.
    """
    if child:
        die_with_parent(signal.SIGKILL)  # before anything that takes time

    from cosmos_app.wfm.disaggregated.replica import serve_rollouts

    guarded(lambda: serve_rollouts(output, deadline_s=deadline_s, child=child))


@wfm.command()
@click.argument("recipe", type=click.Path(path_type=Path), metavar="RECIPE.toml")
@click.argument("overrides", nargs=-1, metavar="[PATH=VALUE]...")
def cache(recipe: Path, overrides: tuple[str, ...]) -> None:
    """Encode the samples of a recipe of kind wfm_sft that its cache does not have yet.

    Runs in this process or in torchrun's, and goes on where an earlier call was ended.
    """
    from cosmos_app.wfm.running import cache_wfm, load_wfm_recipe

    guarded(lambda: cache_wfm(load_wfm_recipe(recipe, overrides)))


@wfm.command()
@click.argument("sft", type=click.Path(path_type=Path), metavar="SFT.toml")
@click.argument("rl", type=click.Path(path_type=Path), metavar="RL.toml")
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs/demo-wfm"))
@click.option("--seed", default=0, show_default=True, help="Of pictures, model and training.")
def demo(sft: Path, rl: Path, *, output: Path, seed: int) -> None:
    """Teach a tiny SD3 coloured shapes from bad captions, then colours by reward.

    Builds everything, needs no network. Writes a grid of pictures of held-out prompts before and
    after, and how often their colour is the one that was asked for.
    """
    silence_loading()
    from cosmos_app.wfm.demo.running import run_demo

    guarded(lambda: run_demo(sft, rl, output, seed=seed))
