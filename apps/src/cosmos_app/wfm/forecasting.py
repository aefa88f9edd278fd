"""``cosmos-app check`` of a world model's recipe: what it would start, and what would stop it."""

import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from cosmos_app.errors import DataError
from cosmos_app.output import print_json
from cosmos_app.shown_recipe import print_recipe
from cosmos_app.wfm.object_store import use_object_store
from cosmos_app.wfm.recipe import WfmRecipe
from cosmos_app.wfm.rewarding import reward_client, validation_scorer
from cosmos_parallel import check_place
from cosmos_wfm import DiffusionRlConfig, RewardServiceError, RunForecast, forecast_run


@dataclass(frozen=True, kw_only=True, slots=True)
class WfmCheck:
    """What was found.

    Attributes:
        forecast: what the recipe would start.
        warnings: what a run would need besides, here and now.
    """

    forecast: RunForecast
    warnings: tuple[str, ...]


def check_wfm(recipe: WfmRecipe, *, as_json: bool, whole: bool = False) -> int:
    """Print a recipe, without its defaults or `whole`, and its forecast; return 0.

    Raises:
        PipelineError: if the model cannot be trained, or not on such ranks.
        WfmConfigError: if sizes, adapters, prompts or rewards do not fit the model or each other.
        CaptionDataError: if the data cannot be read.
        CheckpointPlaceError: if nothing knows how to reach where checkpoints should lie.
    """
    check_place(recipe.checkpoints)
    use_object_store(os.environ)
    found = WfmCheck(forecast=forecast_run(recipe), warnings=_warnings(recipe))
    if as_json:
        print_json(asdict(found))
    else:
        _show(recipe, found, whole=whole)
    return 0


def _warnings(recipe: WfmRecipe) -> tuple[str, ...]:
    warnings: list[str] = []
    try:
        with ExitStack() as stack:
            if isinstance(recipe, DiffusionRlConfig):
                stack.enter_context(reward_client(recipe, patience_s=0.0))
            stack.enter_context(validation_scorer(recipe, draws=True))
    except (DataError, RewardServiceError) as error:
        warnings.append(str(error))
    rising = recipe.learner.optimizer.schedule.num_warmup_steps
    if rising >= recipe.num_steps:
        warnings.append(
            f"learner.optimizer.schedule.num_warmup_steps is {rising}, and num_steps "
            f"{recipe.num_steps}: the learning rate rises until the end"
        )
    checkpoints = Path(recipe.output) / "checkpoints"
    if recipe.checkpoint_every and not recipe.checkpoints and checkpoints.is_dir():
        warnings.append(f"{checkpoints} is there: a run goes on from it with --resume only")
    return tuple(warnings)


def _show(recipe: WfmRecipe, found: WfmCheck, *, whole: bool) -> None:
    console, forecast = Console(), found.forecast
    print_recipe(console, recipe, whole=whole)
    console.print(
        f"{forecast.pipeline}: {forecast.parameters:,} parameters of denoisers, "
        f"{forecast.trained_parameters:,} of them trained; {forecast.memory_mib:.1f} MiB on each "
        "rank for them, gradients and optimizer"
    )
    several = " or a multiple" if forecast.fills_ranks else ""
    console.print(f"ranks: {forecast.ranks}{several}; replicas that draw: {forecast.replicas}")
    if forecast.samples:
        console.print(f"{forecast.samples:,} samples, each seen {forecast.epochs:.2f} times")
    if forecast.prompts:
        console.print(f"{forecast.prompts:,} prompts, each drawn for {forecast.rounds:.2f} times")
    for warning in (*forecast.cut, *found.warnings):
        console.print(f"[yellow]warning:[/] {escape(warning)}")
