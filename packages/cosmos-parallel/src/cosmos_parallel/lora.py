"""Low-rank adapters (Hu et al., 2021) by peft: put in, trained like any parameter, written alone.

    y = W x + (alpha / rank) B A x        W is frozen, A and B are trained, B starts at 0

peft's own layers stand in the model, so what is written here is what peft reads. Adapters are put
in before a model is sharded: FSDP2 then shards them with the layer they belong to.
"""

import json
import math
import tempfile
import warnings
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cosmos_parallel.errors import AdapterError, ExportError
from cosmos_parallel.families import is_tied
from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.rotary_axes import sees
from cosmos_parallel.sharding import model_tensors
from cosmos_parallel.stage_gathering import gather_to, places_of_all
from cosmos_parallel.tensor_files import save_tensors
from cosmos_parallel.weight_files import held_part, held_region

if TYPE_CHECKING:
    import peft

ADAPTER = "default"
ALL_LINEAR = "all-linear"
_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Which layers get an adapter, and how large.

    Attributes:
        rank: of B A.
        alpha: the adapter's output is scaled by alpha / rank.
        targets: names, or ends of names, of the linear layers; ``all-linear`` for all but the
            output head, and of a model that sees for those of its language model.
        rank_stabilised: scale by alpha / sqrt(rank) instead (Kalajdzievski, 2023).
        seed: of the first A; the same on every rank.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    rank_stabilised: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: if the rank is below 1, there is no target, an adapter would add nothing or
                no number, or torch takes no such seed.
        """
        if self.rank < 1:
            raise ValueError(f"lora: rank is {self.rank}; it must be 1 or more")
        if not 0.0 < self.alpha < math.inf:
            raise ValueError(f"lora: alpha is {self.alpha}; it must be above 0 and finite")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"lora: seed is {self.seed}; it must be 0 or more, and below 2^63")
        if not self.targets:
            raise ValueError("lora: no targets; name layers, or all-linear")


def add_lora(model: nn.Module, config: LoraConfig, frozen: AbstractSet[str] = frozenset()) -> None:
    """Put an adapter into a transformers model, in place, and freeze all else; every rank calls.

    Args:
        model: not sharded by FSDP2 yet.
        config: which and how large.
        frozen: names of parameters whose layers get no adapter.

    Raises:
        AdapterError: if peft is not installed, no layer has such a name, or one is the input
            embedding and the output head at once.
    """
    try:
        import peft
    except ImportError as error:
        raise AdapterError("lora needs peft: pip install peft") from error
    targets = ALL_LINEAR if ALL_LINEAR in config.targets else list(config.targets)
    left_out = _left_out(model, frozen, only_language=targets == ALL_LINEAR)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(config.seed)
        # the pattern is peft's own, for stacks of experts, and does match those
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys")
        warnings.filterwarnings("ignore", r"Model has `tie_word_embeddings=True`")  # see below
        warnings.filterwarnings("ignore", r"fan_in_fan_out is set to")  # said of each layer alone
        try:
            peft.inject_adapter_in_model(
                peft.LoraConfig(
                    r=config.rank,
                    lora_alpha=config.alpha,  # type: ignore[arg-type]  (peft computes with floats)
                    target_modules=targets,
                    exclude_modules=left_out or None,
                    use_rslora=config.rank_stabilised,
                    task_type="CAUSAL_LM",
                ),
                model,
                adapter_name=ADAPTER,
            )
        except ValueError as error:
            raise AdapterError(f"lora: {error}") from error
    _check_tied(model)
    _tell_transposed(model)


def _tell_transposed(model: nn.Module) -> None:
    """Have the adapter's configuration say whether it is of layers stored transposed, as GPT-2's.

    peft leaves there what holds for the layer that it adapted last, which may be the output head.
    """
    from transformers.pytorch_utils import Conv1D

    bases = (getattr(layer, "base_layer", None) for layer in model.modules())
    _peft_configs(model)[ADAPTER].fan_in_fan_out = any(isinstance(b, Conv1D) for b in bases)


def _check_tied(model: nn.Module) -> None:
    """Refuse an adapter of one of two layers that have one weight, which no weight is the sum of.

    Raises:
        AdapterError: names the layers that have one.
    """
    config: Any = getattr(model, "config", None)  # any Hugging Face configuration
    if config is None or not is_tied(config):
        return
    holder: Any = model
    ends = (holder.get_input_embeddings(), holder.get_output_embeddings())
    adapted = [n for n, layer in model.named_modules() if layer in ends and _has_adapter(layer)]
    if adapted:
        raise AdapterError(
            f"lora: {', '.join(adapted)}: the model's input embedding and output head are one "
            "weight (tie_word_embeddings), to which an adapter of one of them cannot be added; "
            "leave them out of the targets"
        )


def _has_adapter(layer: nn.Module) -> bool:
    return hasattr(layer, "base_layer")


def _left_out(model: nn.Module, frozen: AbstractSet[str], *, only_language: bool) -> list[str]:
    """Return the linear layers that are frozen, or no part of the language model of a seeing one.

    Engines add adapters to language models alone. A router that is a linear layer and gives more
    than a product, such as Llama 4's, cannot have one.
    """
    config: Any = getattr(model, "config", None)  # any Hugging Face configuration
    language: set[nn.Module] = set(model.modules())
    if only_language and config is not None and sees(config):
        decoder: Any = model
        language = set(decoder.get_decoder().modules())
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and (layer not in language or f"{name}.weight" in frozen or _is_router(layer))
    ]


def _is_router(layer: nn.Linear) -> bool:
    return "Router" in type(layer).__name__


def adapter_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of an adapter's whole parameters by name, in order."""
    return {name: p.shape for name, p in model.named_parameters() if ".lora_" in name}


def start_adapters(model: nn.Module, shapes: Mapping[str, torch.Size], seed: int) -> None:
    """Give adapters their first values, the same under every layout; every rank calls.

    A is drawn as ``nn.Linear`` draws its weight and B is 0; of an embedding's, A is 0 and B normal.

    Args:
        model: with an adapter, sharded or not, in memory; or this rank's stages of it.
        shapes: of the whole model's (`adapter_shapes`).
        seed: the same on every rank.
    """
    generator = torch.Generator().manual_seed(seed)
    own = dict(model.named_parameters())
    for name, shape in shapes.items():
        whole = torch.zeros(shape)
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        elif ".lora_embedding_B." in name:
            whole.normal_(generator=generator)
        if name in own:
            held_part(own[name]).copy_(whole[held_region(own[name])])


def layers_to_split(layer: nn.Module, style: str) -> tuple[nn.Module, ...]:
    """Return the linear layers that tensor parallelism splits for one layer of a model's plan.

    Of a layer with an adapter: the layer itself, and the factor that has its split side. The other
    factor is whole on every rank. Split columns take whole inputs, so A's output is whole and its
    gradient is summed where B takes it in; split rows sum A's short output instead of B's long one.

    Args:
        layer: as the plan names it.
        style: of the plan, such as ``colwise`` or ``rowwise``.
    """
    factors = getattr(layer, "lora_A" if style.startswith("rowwise") else "lora_B", None)
    if not isinstance(factors, nn.ModuleDict):
        return (layer,)
    return (layer.get_submodule("base_layer"), factors[ADAPTER])


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has adapters, which a rank's stages of it need not have."""
    names = (name for name, _ in model.named_parameters())
    return bool(getattr(model, "peft_config", None)) or any(".lora_" in name for name in names)


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapter's parameters in the names of peft's files; whole or DTensors.

    Of a pipeline those of this rank's stages.

    Raises:
        AdapterError: if the model has no adapter.
    """
    _peft_configs(model)
    inner = f".{ADAPTER}"
    return {
        f"{_PREFIX}{name.replace(inner, '')}": parameter.detach()
        for name, parameter in model.named_parameters()
        if ".lora_" in name and inner in name
    }


def moving_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what training changes of a model, frozen or not: its adapters, or all if it has none.

    Names are the model's own, as of ``model_tensors``.
    """
    everything = model_tensors(model)
    if not has_adapters(model):
        return everything
    return {name: value for name, value in everything.items() if ".lora_" in name}


class PeftView(nn.Module):
    """A model with an adapter under the names that a ``PeftModel`` has; computes nothing.

    What takes adapters out of a ``PeftModel`` by name, such as a weight sender, takes this.

    Attributes:
        base_model: holds the model as ``model``.
        peft_config: as of a ``PeftModel``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        self.peft_config = _peft_configs(model)


def export_lora(model: nn.Module, directory: Path, mesh: TrainingMesh, *, base: Path) -> None:
    """Write the adapter as peft does; every rank calls, rank 0 writes.

    ``PeftModel.from_pretrained(base_model, directory)`` loads it. The directory appears whole or
    not at all, and replaces one that is there.

    Args:
        model: with an adapter; of a pipeline, this rank's stages.
        directory: where to; its parent is made.
        mesh: the ranks that hold the model.
        base: the model that the adapter belongs to, named in its config.

    Raises:
        AdapterError: if the model has no adapter.
        ExportError: on every rank, if the directory cannot be written.
    """
    own = adapter_tensors(model)
    gathered = [(place.name, gather_to(0, place, own, mesh)) for place in places_of_all(own, mesh)]
    whole = {name: value for name, value in gathered if value is not None}
    failure: OSError | None = None
    if mesh.process.rank == 0:
        try:
            _write(whole, _peft_configs(model)[ADAPTER], directory, base)
        except OSError as error:
            failure = error
    failed = torch.tensor(int(failure is not None), device=mesh.process.device)
    if mesh.max_(failed).item():
        raise ExportError(
            f"cannot export to {directory}: {failure or 'rank 0 says why'}"
        ) from failure


def _write(
    tensors: dict[str, Tensor], config: "peft.PeftConfig", directory: Path, base: Path
) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        writing = Path(scratch) / "new"
        config.save_pretrained(str(writing))
        written = json.loads((writing / "adapter_config.json").read_text())
        written |= {"base_model_name_or_path": str(base), "inference_mode": True}
        (writing / "adapter_config.json").write_text(json.dumps(written, indent=2, sort_keys=True))
        save_tensors(tensors, writing / "adapter_model.safetensors", {"format": "pt"})
        if directory.exists():
            directory.rename(Path(scratch) / "old")
        writing.rename(directory)


def _peft_configs(model: nn.Module) -> "dict[str, Any]":  # peft's configurations
    configs: dict[str, Any] | None = getattr(model, "peft_config", None)
    if not configs or ADAPTER not in configs:
        raise AdapterError(f"{type(model).__name__} has no adapter; put one in with add_lora")
    return configs
