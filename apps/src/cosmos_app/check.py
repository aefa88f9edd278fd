"""``cosmos-app check``: what a recipe would start, before anything is started."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cosmos_app.bubble import Bubble, predict_bubble, predict_validation_wait
from cosmos_app.errors import StarvedSlotsError
from cosmos_app.given_server import server_warnings
from cosmos_app.held import held_training
from cosmos_app.output import print_json
from cosmos_app.prepare import check_inputs, config_of, require_trainable
from cosmos_app.prepared_data import num_validated
from cosmos_app.quickstart.tiny_model import TinyModelConfig
from cosmos_app.recipe import PolicyConfig, Recipe
from cosmos_app.rollout_config import require_trainable_engine
from cosmos_app.shown_recipe import print_recipe
from cosmos_parallel import ModelConfig as HeldModelConfig
from cosmos_parallel import ParameterCounts, check_packing
from cosmos_parallel import count_parameters as count_of_model

BYTES_OF = {"float32": 4, "bfloat16": 2}
MIB = 1 << 20
_MATRIX = 768
_TRIES = 5


class SizedModel(Protocol):
    """The model section of a recipe, of whatever kind."""

    @property
    def path(self) -> Path | None:
        """A model directory."""
        ...

    @property
    def tiny(self) -> TinyModelConfig:
        """Sizes of the model that is built when there is none."""
        ...

    @property
    def training(self) -> HeldModelConfig:
        """How it is held."""
        ...


class SizedRecipe(Protocol):
    """What counting parameters needs of a recipe."""

    @property
    def model(self) -> SizedModel:
        """What is trained."""
        ...

    @property
    def policy(self) -> PolicyConfig:
        """By how many ranks."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """One kind of process of a run.

    Attributes:
        role: what it does.
        processes: how many.
        memory_mib: of weights, gradients and optimizer in each; not of activations and caches.
    """

    role: str
    processes: int
    memory_mib: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a recipe would do.

    Attributes:
        placements: its processes.
        parameters: of the model.
        trained_parameters: those that take a gradient: of adapters, or all that are not frozen.
        groups_in_flight: most prompts issued and not yet trained on, from the admission depth.
        slots: prompts that the rollout replicas can hold at once, those being scored too.
        starved_slots: slots that admission leaves empty: while one step trains, or between two
            steps where nothing is sampled while one trains.
        bubble: idle time of both sides as simulated, were they equally fast.
        train_s: least time to train on one step, were every product to run at this device's
            measured matrix rate: 6 floating-point operations a parameter and token.
        generate_s: the same for sampling one step on all rollouts: 2 a parameter and token.
        validation_s: for how long training waits at least for each validation in between, as
            simulated with both sides equally fast, a step in the longer of these two times.
        warnings: what is legal but unwise.
    """

    placements: tuple[Placement, ...]
    parameters: int
    trained_parameters: int
    groups_in_flight: int
    slots: int
    starved_slots: int
    bubble: Bubble
    train_s: float
    generate_s: float
    validation_s: float
    warnings: tuple[str, ...]


def count_parameters(recipe: SizedRecipe) -> ParameterCounts:
    """Return the parameters of the recipe's model without reading or making its weights.

    Of a model that is built for the run the vocabulary is not known yet; a small one is counted.

    Raises:
        DataError: if the recipe names a directory without a model in it.
        MeshError: if the model cannot be divided as the recipe says.
        FreezeError: if no parameter is called as one that is to be frozen.
        AdapterError: if the adapters fit no layer.
    """
    held = held_training(recipe)
    model = recipe.model.path or recipe.model.tiny
    require_trainable(model, recipe.policy, held)
    return count_of_model(config_of(model), held)


def require_layout(recipe: SizedRecipe, layout: str) -> None:
    """Look whether the recipe's model can have several samples in a row, if they are packed.

    Raises:
        PackingError: if it cannot.
    """
    if layout == "packed":
        config = config_of(recipe.model.path or recipe.model.tiny)
        check_packing(config, held_training(recipe), recipe.policy.parallel)


def trained_mib(counts: ParameterCounts, training: HeldModelConfig) -> float:
    """Return the memory of weights, gradients and two moments, each held as the weights are."""
    held = counts.whole + (counts.trained if training.lora else 0)
    return (held + 3 * counts.trained) * BYTES_OF[training.dtype] / MIB


def matrix_rate() -> float:
    """Measure this device's floating-point operations per second in float32 matrix products."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.randn(_MATRIX, _MATRIX, device=device)
    best_s = float("inf")
    for _ in range(_TRIES):
        begun = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        best_s = min(best_s, time.perf_counter() - begun)
    return 2 * _MATRIX**3 / best_s


def forecast(recipe: Recipe, counts: ParameterCounts, rate: float) -> Forecast:
    """Work out processes, memory, admission and least times of a recipe.

    Args:
        recipe: what would run.
        counts: of its model.
        rate: floating-point operations per second of one process.
    """
    samples = recipe.trainer.groups_per_step * recipe.trainer.samples_per_group
    parameters = counts.whole
    operations = parameters * samples * recipe.rollout.sampling.max_new_tokens
    ranks = recipe.policy.replicas * recipe.policy.ranks
    weight_bytes = parameters * BYTES_OF[recipe.model.training.dtype]
    sent = counts.trained if recipe.model.training.lora else parameters  # of adapters they alone
    copies_mib = 2 * sent * BYTES_OF[recipe.model.training.dtype] / MIB
    policy_mib = trained_mib(counts, recipe.model.training) + copies_mib
    in_flight = (recipe.staleness.depth + 1) * recipe.trainer.groups_per_step
    slots = recipe.rollout.replicas * (recipe.rollout.slots + recipe.rollout.scoring)
    starved = max(0, slots - _most_sampled(recipe))
    train_s = 6 * operations / rate / ranks
    generate_s = 2 * operations / rate / recipe.rollout.replicas
    warnings: list[str] = []
    if starved:
        warnings.append(_starving(recipe, slots))
    if not recipe.staleness.depth:
        warnings.append("staleness.depth=0: rollouts wait while the policy trains (on-policy)")
    return Forecast(
        placements=(
            Placement(role="controller", processes=1, memory_mib=0.0),
            Placement(
                role="policy",
                processes=recipe.policy.replicas * recipe.policy.ranks,
                memory_mib=policy_mib / recipe.policy.ranks,
            ),
            Placement(
                role="rollout",
                processes=recipe.rollout.replicas,
                memory_mib=2 * weight_bytes / MIB,
            ),
        ),
        parameters=parameters,
        trained_parameters=counts.trained,
        groups_in_flight=in_flight,
        slots=slots,
        starved_slots=starved,
        bubble=predict_bubble(recipe),
        train_s=train_s,
        generate_s=generate_s,
        validation_s=_num_waited(recipe) * max(train_s, generate_s),
        warnings=tuple(warnings),
    )


def _num_waited(recipe: Recipe) -> float:
    """Return for how many steps' time training waits for each validation in between."""
    if not recipe.validation.every:
        return 0.0
    return predict_validation_wait(recipe, num_validated(recipe))


def _most_sampled(recipe: Recipe) -> int:
    """Return how many prompts admission lets be sampled at once, while a step trains if any do."""
    return max(1, recipe.staleness.depth) * recipe.trainer.groups_per_step


def _starving(recipe: Recipe, slots: int) -> str:
    """Say how many slots stay empty, why, and what to do about it."""
    most = _most_sampled(recipe)
    when, remedy = "while a step trains", "raise staleness.depth"
    if not recipe.staleness.depth:
        when, remedy = "for each step (staleness.depth is 0)", "raise trainer.groups_per_step"
    of_scoring, lower = "", "rollout.slots"
    if scoring := recipe.rollout.replicas * recipe.rollout.scoring:
        of_scoring, lower = f", {scoring} of them for scoring", "rollout.slots or rollout.scoring"
    return (
        f"admission lets {most} prompts generate {when}, the rollouts have {slots} "
        f"slots{of_scoring}: {slots - most} stay empty; {remedy} or lower {lower}"
    )


def check_recipe(recipe: Recipe, *, as_json: bool, whole: bool = False) -> int:
    """Print a recipe, without its defaults or `whole`, and its forecast; return 0.

    Raises:
        StarvedSlotsError: after that, if admission would leave slots empty for good.
        DataError: if a file that the recipe names cannot be used, its teacher has other tokens, or
            its engine never gets what is trained.
        MeshError: if the model cannot be divided as the recipe says.
        PackingError: if it cannot have several samples in a row, as the recipe says.
        ServerSettingsError: if a server of the recipe's own would lose the run.
    """
    require_trainable_engine(recipe.rollout)
    of_inputs = check_inputs(recipe)
    require_layout(recipe, recipe.trainer.layout)
    predicted = forecast(recipe, count_parameters(recipe), matrix_rate())
    warnings = (*predicted.warnings, *of_inputs, *server_warnings(recipe.bus))
    predicted = replace(predicted, warnings=warnings)
    if as_json:
        print_json(asdict(predicted))
    else:
        _show(recipe, predicted, whole=whole)
    if predicted.starved_slots:
        raise StarvedSlotsError(predicted.warnings[0])
    return 0


def _said_of_validations(wait_s: float) -> str:
    if not wait_s:
        return "training waits for no validation in between"
    return (
        f"training waits at least {wait_s:,.3f} s for each validation in between; a second rollout "
        "replica would have it go on, a larger staleness.bound for longer"
    )


def _show(recipe: Recipe, predicted: Forecast, *, whole: bool) -> None:
    console = Console()
    print_recipe(console, recipe, whole=whole)
    table = Table("role", "processes", "MiB each, weights and optimizer", title="placement")
    for placement in predicted.placements:
        table.add_row(placement.role, str(placement.processes), f"{placement.memory_mib:.1f}")
    console.print(table)
    console.print(
        f"{predicted.parameters:,} parameters, {predicted.trained_parameters:,} of them trained; "
        f"at most {predicted.groups_in_flight} prompts in flight over {predicted.slots} slots"
    )
    console.print(
        f"predicted bubble, were both sides equally fast: policy {predicted.bubble.policy:.0%}, "
        f"rollouts {predicted.bubble.rollout:.0%}; a step takes {predicted.bubble.over_bound:.2f} "
        "times what it has to"
    )
    console.print(
        f"a step takes at least {predicted.train_s:,.3f} s to train on and "
        f"{predicted.generate_s:,.3f} s to sample, at the matrix rate of this machine"
    )
    if recipe.validation.every:
        console.print(_said_of_validations(predicted.validation_s))
    for warning in predicted.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
