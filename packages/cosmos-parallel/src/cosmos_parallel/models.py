"""Loading a Hugging Face causal language model for training, sharded with FSDP2."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from cosmos_core.choices import check_choice
from cosmos_parallel.chance import tell_dropout, turn_dropout_off, turn_jitter_off
from cosmos_parallel.compiling import compile_layers
from cosmos_parallel.context import attend_from_stretches, divide_context
from cosmos_parallel.errors import MeshError, ModelNotFoundError
from cosmos_parallel.families import Implementation, check_layout, choose_implementation
from cosmos_parallel.freezing import freeze, frozen_names
from cosmos_parallel.generic import apply_tensor_plan
from cosmos_parallel.generic_weights import (
    auto_class,
    build_empty,
    cannot_load_error,
    fill_parts,
    supported_attention,
)
from cosmos_parallel.idle_parts import keep_idle_parts
from cosmos_parallel.lora import LoraConfig, adapter_shapes, add_lora, start_adapters
from cosmos_parallel.low_precision import LowPrecisionConfig, use_low_precision
from cosmos_parallel.mesh import ParallelConfig, TrainingMesh
from cosmos_parallel.packed_attention import use_packed_attention
from cosmos_parallel.rope_length import hold_length
from cosmos_parallel.sequence_parallel import check_rows
from cosmos_parallel.sharding import mixed_precision_error, shard_module
from cosmos_parallel.staged import load_staged
from cosmos_parallel.titan import prepare
from cosmos_parallel.token_ids import guard_token_ids
from cosmos_parallel.value_head import add_value_head, start_value_head
from cosmos_parallel.weight_files import mismatch_error

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from cosmos_parallel.native.model import NativeCausalLM
    from cosmos_parallel.staged import StagedCausalLM

    CausalLM = PreTrainedModel | NativeCausalLM | StagedCausalLM

DtypeName = Literal["float32", "bfloat16"]
Checkpointing = Literal["none", "full"]
Compiler = Literal["none", "inductor", "aot_eager"]
Attention = Literal["sdpa", "eager", "flash_attention_2"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """How the weights are held and computed with.

    Attributes:
        dtype: type of the parameters, of their gradients' sum and of the optimizer's state.
        compute_dtype: type of forward and backward; needs a process group when it differs.
        activation_checkpointing: ``full`` recomputes each decoder layer in the backward pass.
        low_precision: multiply in 8 bits; ``None`` multiplies in ``compute_dtype``.
        compile: backend with which torch compiles each decoder layer; under ``tp`` for each length
            of a row by itself, up to eight.
        lora: train adapters in place of the weights; ``None`` trains the weights.
        attention: attention implementation of transformers; with ``sdpa``, rows of several
            samples are attended to sample by sample, and bounded scores and sinks are computed
            with all scores of a sample at once, which ``flash_attention_2`` does not hold.
        implementation: whose code computes the model. ``auto`` is that of transformers, unless the
            mesh has an axis that it lacks and torchtitan's has. ``native`` is torchtitan's, which
            has no ``lora``, ``low_precision`` and ``freeze``.
        value_head: add a linear layer ``value_head`` from last hidden states to one number, which
            begins at 0; for critics and reward models.
        freeze: patterns of names of parameters that are left as they are, such as
            ``model.visual.*``, in transformers' implementation; ``lora`` adds no adapter there.
        context_length: tokens of the longest sequence, for models whose rotary embedding goes by it
            (LongRoPE, dynamic scaling), as ``max_model_len`` is for vLLM; 0 is what vLLM takes by
            itself. With ``None`` each pass goes by its own longest position, as in transformers.
        sequence_parallel: under ``tp``, have each rank of transformers' implementation keep a
            stretch of every row between the parts of a layer, as torchtitan's always does: less
            memory for activations, and half as much more communication.
    """

    dtype: DtypeName = "float32"
    compute_dtype: DtypeName = "float32"
    activation_checkpointing: Checkpointing = "none"
    low_precision: LowPrecisionConfig | None = None
    compile: Compiler = "none"
    lora: LoraConfig | None = None
    attention: Attention = "sdpa"
    implementation: Implementation = "auto"
    value_head: bool = False
    freeze: tuple[str, ...] = ()
    context_length: int | None = None
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        """Refuse unknown names, a length below 0, and to have torchtitan's modules changed."""
        check_choice("dtype", self.dtype, DtypeName)
        check_choice("compute_dtype", self.compute_dtype, DtypeName)
        check_choice("activation_checkpointing", self.activation_checkpointing, Checkpointing)
        check_choice("compile", self.compile, Compiler)
        check_choice("attention", self.attention, Attention)
        check_choice("implementation", self.implementation, Implementation)
        if self.context_length is not None and self.context_length < 0:
            raise ValueError(f"context_length is {self.context_length}; it must be 0 or more")
        if self.sequence_parallel and self.compile != "none":
            raise ValueError("compile: layers with sequence_parallel are not compiled; take one")
        if self.implementation == "native" and self.changes:
            raise ValueError(
                f"implementation is 'native', which has no {' and no '.join(self.changes)}: "
                "set it to 'transformers', or to 'auto'"
            )

    @property
    def changes(self) -> list[str]:
        """What changes modules, or goes by their names, which takes those of transformers."""
        wanted = {"lora": self.lora, "low_precision": self.low_precision, "freeze": self.freeze}
        return [name for name, value in wanted.items() if value]

    @property
    def wanted_implementation(self) -> Implementation:
        """Whose modules are asked for."""
        return "transformers" if self.changes else self.implementation

    @property
    def casts(self) -> bool:
        """Whether weights are cast to be computed with, by FSDP2, which needs a process group."""
        return self.compute_dtype != self.dtype


def check_model_directory(path: Path, *, needs_tokenizer: bool = False) -> None:
    """Raise unless ``path`` holds a Hugging Face model with safetensors weights.

    Raises:
        ModelNotFoundError: naming every file that is missing and what to do about it.
    """
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise ModelNotFoundError(
            f"model directory {path} {found}; give a directory in Hugging Face form, holding "
            "config.json, *.safetensors and a tokenizer (a hub model: download it first)"
        )
    missing: list[str] = []
    if not (path / "config.json").is_file():
        missing.append("config.json")
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if needs_tokenizer and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    if missing:
        hint = ""
        if "*.safetensors" in missing and any(path.glob("*.bin")):
            hint = "; its weights are pickled (*.bin): convert them with save_pretrained"
        elif (path / "model_index.json").is_file():
            hint = "; it holds a diffusers pipeline, which is not a language model"
        raise ModelNotFoundError(
            f"model directory {path} lacks {', '.join(missing)}{hint}; it must be in Hugging Face "
            "form: config.json, *.safetensors and a tokenizer"
        )


def load_causal_lm(
    path: Path | str, mesh: TrainingMesh, config: ModelConfig | None = None
) -> "CausalLM":
    """Load any Hugging Face causal language model on its part of the mesh; every rank calls.

    The result is called as models of transformers are and is in training mode. It is transformers'
    own, with names as in the checkpoint in memory, or torchtitan's (see ``ModelConfig``), whose
    names ``to_hf`` turns into those of the checkpoint. Parameters are DTensors when the mesh has a
    process group. Dropout and the jitter of routers are off: log-probabilities must not depend on
    chance.

    Raises:
        ModelNotFoundError: if the directory is not a complete model.
        ModelMismatchError: if its weights do not fit its config.
        MeshError: if the model cannot be trained on such a mesh.
        FreezeError: if there is nothing that a pattern of ``freeze`` could mean.
    """
    config, path = config or ModelConfig(), Path(path)
    check_model_directory(path)
    hf_config = read_config(path)
    check_trainable(hf_config, config, mesh.config, mesh.process.world_size)
    if chosen_implementation(hf_config, config, mesh.config) == "native":
        model: CausalLM = _load_native(path, hf_config, mesh, config)
    else:
        model = _load_generic(path, hf_config, mesh, config)
        start_value_head(model)
    guard_token_ids(model)
    return model


def check_trainable(
    hf_config: "PretrainedConfig", config: ModelConfig, parallel: ParallelConfig, world_size: int
) -> None:
    """Check, before anything is loaded, that so many ranks can train a model held like this.

    Raises:
        MeshError: saying which degree does not divide what, or which axis the model cannot have.
    """
    splits_backward = parallel.pp > 1 and parallel.pp_schedule.endswith("ZeroBubble")
    if config.activation_checkpointing == "full" and splits_backward:
        raise MeshError(
            f"pp_schedule {parallel.pp_schedule} runs the backward pass in two parts, and torch "
            "recomputes for one: use 1F1B or Interleaved1F1B, or no activation_checkpointing"
        )
    if _reads_ahead(hf_config):
        raise MeshError(
            f"this {hf_config.model_type} model is no decoder (is_decoder is false in its config): "
            "its tokens see those behind them, and have no log-probabilities"
        )
    wanted = config.wanted_implementation
    resolved = check_layout(hf_config, parallel, world_size, implementation=wanted)
    rows_too = config.sequence_parallel and resolved.tp > 1
    if rows_too and chosen_implementation(hf_config, config, resolved) == "transformers":
        check_rows(hf_config)


def chosen_implementation(
    hf_config: "PretrainedConfig", config: ModelConfig, parallel: ParallelConfig
) -> Literal["native", "transformers"]:
    """Return whose code computes a model held like this, and whose names checkpoints of it have.

    Raises:
        MeshError: if torchtitan's is wanted or needed and does not compute this model.
    """
    return choose_implementation(hf_config, parallel, config.wanted_implementation)


def _load_generic(
    path: Path, hf_config: "PretrainedConfig", mesh: TrainingMesh, config: ModelConfig
) -> "PreTrainedModel | StagedCausalLM":
    wanted = "sdpa" if mesh.context_group is not None else config.attention
    attention = supported_attention(hf_config, wanted)
    dtype = getattr(torch, config.dtype)
    # weights of few bits are turned into others by transformers, whole
    by_parts = mesh.is_distributed and getattr(hf_config, "quantization_config", None) is None
    read = build_empty if by_parts else _read_model
    compute_dtype = getattr(torch, config.compute_dtype) if config.casts else None

    adapters: dict[str, torch.Size] = {}  # of the whole model

    def make() -> "PreTrainedModel":
        dropout = turn_dropout_off(hf_config)
        made = read(path, hf_config, dtype, attention)
        tell_dropout(made.config, dropout)
        _prepare(made, mesh, config)
        adapters.update(adapter_shapes(made))
        return made

    if mesh.config.pp > 1:
        model = load_staged(make, path, mesh, blocks=decoder_layers, compute_dtype=compute_dtype)
    else:
        model = make()
        shard_module(model, mesh, blocks=decoder_layers(model), compute_dtype=compute_dtype)
        if by_parts:
            fill_parts(model, path, mesh.process.device)
    if config.lora is not None:
        start_adapters(model, adapters, config.lora.seed)
    return model


def _prepare(model: "PreTrainedModel", mesh: TrainingMesh, config: ModelConfig) -> None:
    """Change what a model computes with, before FSDP2 shards it."""
    context = mesh.context_group
    if context is None:
        use_packed_attention(model)
    if config.low_precision is not None:
        use_low_precision(model, config.low_precision, mesh.process.device)
    frozen = frozen_names(model, config.freeze)
    freeze(model, frozen)
    if config.lora is not None:
        add_lora(model, config.lora, frozen)
    if config.value_head:
        add_value_head(model)
    model.train()
    turn_jitter_off(model)
    keep_idle_parts(model)
    if config.activation_checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if mesh.dims is not None and mesh.config.tp > 1:
        apply_tensor_plan(model, mesh.dims.get_mesh("tp"), rows_too=config.sequence_parallel)
    is_divided = context is not None or mesh.config.pp > 1
    hold_length(model, config.context_length, is_divided=is_divided)
    if context is not None:
        attend_from_stretches(model)
        if mesh.config.pp == 1:  # a stage is divided when it is cut
            divide_context(model, context)
    if config.compile != "none":
        compile_layers(decoder_layers(model), config.compile, mesh.config)


def _load_native(
    path: Path, hf_config: "PretrainedConfig", mesh: TrainingMesh, config: ModelConfig
) -> "NativeCausalLM":
    if not mesh.is_distributed and config.casts:
        raise mixed_precision_error(config.compute_dtype, config.dtype)
    prepare(mesh.process.device_type)
    from cosmos_parallel.native.building import NativeSettings, load_native

    how = NativeSettings(
        dtype=getattr(torch, config.dtype),
        compute_dtype=getattr(torch, config.compute_dtype),
        recompute=config.activation_checkpointing == "full",
        compile_backend=None if config.compile == "none" else config.compile,
        value_head=config.value_head,
    )
    return load_native(path, hf_config, mesh, how)


def read_config(path: Path) -> "PretrainedConfig":
    """Return the config of a model directory.

    Raises:
        ModelMismatchError: if transformers does not know such a model.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise cannot_load_error(path, error) from error


def decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """Return the repeated blocks of a transformer that is not sharded yet.

    These are the modules that transformers says must not be split; for a model that says nothing,
    the members of the ``nn.ModuleList`` with the most parameters.
    """
    unsplit: set[str] = set(getattr(model, "_no_split_modules", None) or ())
    named = [part for part in model.modules() if type(part).__name__ in unsplit]
    if named:
        return named
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    # the first of equals is the outermost
    return list(max(lists, key=lambda part: sum(p.numel() for p in part.parameters()), default=[]))


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Keep transformers from drawing progress bars on the console inside the block."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _read_model(
    path: Path, model_config: "PretrainedConfig", dtype: torch.dtype, attention: str
) -> "PreTrainedModel":
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        # annotated: the stubs do not know of output_loading_info
        with quiet_transformers():
            loaded: Any = auto_class(model_config).from_pretrained(
                path,
                config=model_config,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
            )
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        SafetensorError,
        StrictDataclassError,
    ) as error:
        raise cannot_load_error(path, error) from error
    model, loading = loaded
    for problem in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in loading[problem])
        if names:
            raise mismatch_error(
                path, [f"{problem.removesuffix('_keys')} weights: {name}" for name in names]
            )
    return model


def _reads_ahead(config: "PretrainedConfig") -> bool:
    """Whether transformers would build an encoder, of those that can be either."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    is_either = config.model_type in {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation"}
    return is_either and getattr(config, "is_decoder", True) is False
