"""``cosmos-app check`` of a recipe with given data: what it would start."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from rich.console import Console
from rich.markup import escape

from cosmos_app.check import count_parameters, require_layout, trained_mib
from cosmos_app.data_sets import shares_of
from cosmos_app.given.data_config import sources_of
from cosmos_app.given.divided import require_rest
from cosmos_app.given.files import check_inputs
from cosmos_app.given.recipe import GivenRecipe
from cosmos_app.given_server import server_warnings
from cosmos_app.output import print_json
from cosmos_app.shown_recipe import print_recipe
from cosmos_core.turns import CYCLE, turns_of
from cosmos_parallel import read_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class SetForecast:
    """What a recipe would do with one of several data sets.

    Attributes:
        rows: examples to train on before any is dropped for its length; none of a set that is
            only measured.
        share: of the examples of every stretch of steps.
        epochs: how often each is seen.
    """

    rows: int
    share: float
    epochs: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenForecast:
    """What a recipe with given data would do.

    Attributes:
        processes: ranks of all replicas.
        rows: examples before any is dropped for its length.
        epochs: how often each is seen; the mean over all where data sets have shares.
        data_sets: the same of each of several, less what is kept back.
        parameters: of the model; of one with few characters when it is built from the data.
        trained_parameters: those that take a gradient: of adapters, or all that are not frozen.
        memory_mib: of weights, gradients and two moments on each rank, activations apart.
        warnings: what a run would find wrong with a server of the recipe's own.
    """

    processes: int
    rows: int
    epochs: float
    data_sets: Mapping[str, SetForecast]
    parameters: int
    trained_parameters: int
    memory_mib: float
    warnings: tuple[str, ...] = ()


def forecast_given(recipe: GivenRecipe) -> GivenForecast:
    """Read the data once and count; nothing is loaded.

    Raises:
        DataError: if the recipe names a directory without a model in it, or keeps every row back.
        MeshError: if the model cannot be divided as the recipe says.
        FreezeError: if no parameter is called as one that is to be frozen.
        AdapterError: if the adapters fit no layer.
        SftDataError: if the data cannot be read.
    """
    rows, trained = 0, dict[str, int]()
    for source in sources_of(recipe.data):
        num_rows = 0
        if source.path is not None:
            num_rows = sum(1 for _ in read_rows(source.path, source.rows.split))
            require_rest(source, num_rows)
        rows += num_rows
        trained[source.name] = num_rows - source.held_out if num_rows else 0
    counts = count_parameters(recipe)
    trainer = recipe.trainer
    return GivenForecast(
        processes=recipe.policy.replicas * recipe.policy.ranks,
        rows=rows,
        epochs=trainer.steps * trainer.batch.batch_size / sum(trained.values()),
        data_sets=_by_set(recipe, trained) if recipe.data.sets else {},
        parameters=counts.whole,
        trained_parameters=counts.trained,
        memory_mib=trained_mib(counts, recipe.model.training) / recipe.policy.ranks,
    )


def _by_set(recipe: GivenRecipe, trained: Mapping[str, int]) -> dict[str, SetForecast]:
    """Return what would become of each data set, of which so many rows are trained on."""
    shares, whole = shares_of(recipe.data.sets), sum(trained.values())
    turns = turns_of(shares) if shares else {}
    drawn = recipe.trainer.steps * recipe.trainer.batch.batch_size

    def forecast(name: str, rows: int) -> SetForecast:
        share = turns.get(name, 0) / CYCLE if turns else rows / whole
        return SetForecast(rows=rows, share=share, epochs=drawn * share / rows if rows else 0.0)

    return {name: forecast(name, rows) for name, rows in trained.items()}


def _tell_sets(data_sets: Mapping[str, SetForecast]) -> list[str]:
    """Say of each data set what would become of it."""
    return [
        f"data set {name}: {found.share:.1%} of the examples, {found.rows:,} rows each seen "
        f"{found.epochs:.2f} times"
        if found.rows
        else f"data set {name}: only measured"
        for name, found in data_sets.items()
    ]


def check_given(recipe: GivenRecipe, *, as_json: bool, whole: bool = False) -> int:
    """Print a recipe, without its defaults or `whole`, and its forecast; return 0.

    Raises:
        DataError: if the recipe names a directory without a model in it, or a teacher that has
            other tokens than the model or cannot be divided as the recipe says.
        MeshError: if the model cannot be divided as the recipe says.
        PackingError: if it cannot have several examples in a row, as the recipe says.
        CheckpointPlaceError: if nothing knows how to reach where checkpoints should lie.
        SftDataError: if the data cannot be read.
        ServerSettingsError: if a server of the recipe's own would lose the run.
    """
    check_inputs(recipe)
    require_layout(recipe, recipe.trainer.batch.layout)
    predicted = replace(forecast_given(recipe), warnings=server_warnings(recipe.bus))
    if as_json:
        print_json(asdict(predicted))
        return 0
    console = Console()
    print_recipe(console, recipe, whole=whole)
    console.print(
        f"{predicted.rows:,} rows, each seen {predicted.epochs:.2f} times; "
        f"{predicted.parameters:,} parameters, {predicted.trained_parameters:,} of them trained; "
        f"processes: {predicted.processes}, with {predicted.memory_mib:,.1f} MiB each for weights, "
        "gradients and optimizer"
    )
    for line in _tell_sets(predicted.data_sets):
        console.print(line)
    for warning in predicted.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    return 0
