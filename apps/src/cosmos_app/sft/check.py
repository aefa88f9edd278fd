"""``cosmos-app check`` of a supervised recipe: what it would start, before anything is started."""

from dataclasses import asdict, dataclass

from rich.console import Console

from cosmos_app.output import print_json
from cosmos_app.prepare import require_model
from cosmos_app.sft.recipe import SftRecipe
from cosmos_core.config import config_to_json
from cosmos_parallel import read_rows

_BYTES_OF = {"float32": 4, "bfloat16": 2}
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SftForecast:
    """What a supervised recipe would do.

    Attributes:
        processes: ranks of all replicas.
        rows: examples before any is dropped for its length.
        epochs: how often each is seen.
        parameters: of the model; 0 when it is built from the data.
        memory_mib: of weights, gradients and two moments on each rank, activations apart.
    """

    processes: int
    rows: int
    epochs: float
    parameters: int
    memory_mib: float


def forecast_sft(recipe: SftRecipe) -> SftForecast:
    """Read the data once and count; nothing is loaded.

    Raises:
        DataError: if the recipe names a directory without a model in it.
        SftDataError: if the data cannot be read.
    """
    rows = sum(1 for _ in read_rows(recipe.data.path, recipe.data.rows.split))
    parameters = _count_parameters(recipe)
    trained_bytes = parameters * 4 * _BYTES_OF[recipe.model.training.dtype]
    trainer = recipe.trainer
    return SftForecast(
        processes=recipe.policy.replicas * recipe.policy.ranks,
        rows=rows,
        epochs=trainer.steps * trainer.batch.batch_size / max(1, rows - recipe.data.held_out),
        parameters=parameters,
        memory_mib=trained_bytes / recipe.policy.ranks / _MIB,
    )


def check_sft(recipe: SftRecipe, *, as_json: bool) -> int:
    """Print the resolved recipe and its forecast; return 0.

    Raises:
        DataError: if the recipe names a directory without a model in it.
        SftDataError: if the data cannot be read.
    """
    predicted = forecast_sft(recipe)
    if as_json:
        print_json(asdict(predicted))
        return 0
    console = Console()
    console.print_json(config_to_json(recipe))
    console.print(
        f"{predicted.rows:,} rows, each seen {predicted.epochs:.2f} times; "
        f"{predicted.parameters:,} parameters on {predicted.processes} processes, "
        f"{predicted.memory_mib:.1f} MiB each for weights, gradients and optimizer"
    )
    return 0


def _count_parameters(recipe: SftRecipe) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if recipe.model.path is None:
        return 0
    require_model(recipe.model.path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(recipe.model.path))
    return sum(parameter.numel() for parameter in model.parameters())
