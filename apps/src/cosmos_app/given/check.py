"""``cosmos-app check`` of a recipe with given data: what it would start."""

from dataclasses import asdict, dataclass

from rich.console import Console

from cosmos_app.check import count_parameters, trained_mib
from cosmos_app.given.files import check_inputs
from cosmos_app.given.recipe import GivenRecipe
from cosmos_app.given.task import require_rest
from cosmos_app.output import print_json
from cosmos_app.shown_recipe import shown_as_json
from cosmos_parallel import read_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenForecast:
    """What a recipe with given data would do.

    Attributes:
        processes: ranks of all replicas.
        rows: examples before any is dropped for its length.
        epochs: how often each is seen.
        parameters: of the model; of one with few characters when it is built from the data.
        trained_parameters: those that take a gradient: of adapters, or all that are not frozen.
        memory_mib: of weights, gradients and two moments on each rank, activations apart.
    """

    processes: int
    rows: int
    epochs: float
    parameters: int
    trained_parameters: int
    memory_mib: float


def forecast_given(recipe: GivenRecipe) -> GivenForecast:
    """Read the data once and count; nothing is loaded.

    Raises:
        DataError: if the recipe names a directory without a model in it, or keeps every row back.
        MeshError: if the model cannot be divided as the recipe says.
        FreezeError: if no parameter is called as one that is to be frozen.
        AdapterError: if the adapters fit no layer.
        SftDataError: if the data cannot be read.
    """
    data = recipe.data
    rows = sum(1 for _ in read_rows(data.path, data.rows.split))
    require_rest(data, rows)
    counts = count_parameters(recipe)
    trainer = recipe.trainer
    return GivenForecast(
        processes=recipe.policy.replicas * recipe.policy.ranks,
        rows=rows,
        epochs=trainer.steps * trainer.batch.batch_size / (rows - data.held_out),
        parameters=counts.whole,
        trained_parameters=counts.trained,
        memory_mib=trained_mib(counts, recipe.model.training) / recipe.policy.ranks,
    )


def check_given(recipe: GivenRecipe, *, as_json: bool) -> int:
    """Print the resolved recipe and its forecast; return 0.

    Raises:
        DataError: if the recipe names a directory without a model in it, or a teacher that has
            other tokens than the model or cannot be divided as the recipe says.
        MeshError: if the model cannot be divided as the recipe says.
        CheckpointPlaceError: if nothing knows how to reach where checkpoints should lie.
        SftDataError: if the data cannot be read.
    """
    check_inputs(recipe)
    predicted = forecast_given(recipe)
    if as_json:
        print_json(asdict(predicted))
        return 0
    console = Console()
    console.print_json(shown_as_json(recipe))
    console.print(
        f"{predicted.rows:,} rows, each seen {predicted.epochs:.2f} times; "
        f"{predicted.parameters:,} parameters, {predicted.trained_parameters:,} of them trained; "
        f"processes: {predicted.processes}, with {predicted.memory_mib:,.1f} MiB each for weights, "
        "gradients and optimizer"
    )
    return 0
