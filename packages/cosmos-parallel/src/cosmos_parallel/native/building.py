"""Build a torchtitan model on its part of the mesh, empty, and fill it from safetensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.config import ParallelismConfig
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.rope import RoPE
from torchtitan.protocols.module import Module

from cosmos_parallel.compiling import compile_layers
from cosmos_parallel.families import is_tied
from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.native.carried import carry
from cosmos_parallel.native.families import decoder_config, names_of
from cosmos_parallel.native.model import NativeCausalLM
from cosmos_parallel.native.pipeline import PipelinedCausalLM
from cosmos_parallel.native.stage import Stage, keep_only
from cosmos_parallel.native.weights import fill
from cosmos_parallel.packed_attention import state_layers
from cosmos_parallel.pipeline import divide_layers, stages_of_rank
from cosmos_parallel.sharding import keep_gathered, sum_gradients
from cosmos_parallel.value_head import ValueHeadElsewhere, make_value_head, start_value_head
from cosmos_parallel.weight_files import WeightFiles

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeSettings:
    """How a model is held and computed with.

    Attributes:
        dtype: of the parameters.
        compute_dtype: of forward and backward.
        recompute: run every layer's forward pass again in the backward pass.
        compile_backend: with which torch compiles every layer; ``None`` for not at all.
        value_head: whether the last hidden states go to a value head too, which begins at 0.
    """

    dtype: torch.dtype
    compute_dtype: torch.dtype
    recompute: bool
    compile_backend: str | None
    value_head: bool = False


def load_native(
    path: Path, config: "PretrainedConfig", mesh: TrainingMesh, how: NativeSettings
) -> NativeCausalLM:
    """Load a model that passes ``native_refusal`` and ``check_layout``; every rank calls.

    Each rank makes and reads only what it holds of its own layers.

    Args:
        path: directory in Hugging Face form.
        config: its config.
        mesh: the ranks of the replica.
        how: to hold it and to compute with it.

    Raises:
        ModelMismatchError: if the files do not hold what the config describes.
    """
    with WeightFiles(path) as files:
        names = files.names
    model = _build(config, mesh, how, names)
    if how.compile_backend is not None:
        layers = model.decoder.get_submodule("layers").children()
        compile_layers(layers, how.compile_backend, mesh.config)
    if mesh.config.tp > 1 and any(isinstance(part, MoE) for part in model.modules()):
        # gradients of DTensors with a dim of size 1 come out wrong around torchtitan's experts
        model.least_rows = 2
    model.runs_packed_rows = (
        mesh.config.cp == 1  # which takes a mask of the row's square
        and model.least_rows == 1
        and not state_layers(config.get_text_config())  # which pad all samples to the longest
    )
    device = mesh.process.device
    carry(model, path, how.dtype)
    model.to_empty(device=device)
    if is_tied(config):
        model.tie_weights()
    _start_buffers(model, device)
    fill(model, path)
    start_value_head(model)
    return model.train()


def _build(
    config: "PretrainedConfig", mesh: TrainingMesh, how: NativeSettings, names: Sequence[str]
) -> NativeCausalLM:
    settings = decoder_config(config)
    degrees = mesh.config
    hf_names = names_of(config, settings).as_in(names)
    settings.update_from_config(
        config=_RunSettings(
            ParallelismConfig(
                tensor_parallel_degree=degrees.tp,
                context_parallel_degree=degrees.cp,
                pipeline_parallel_degree=degrees.pp,
                expert_parallel_degree=degrees.ep,
                spmd_backend="partial_dtensor",
            )
        )
    )
    stages: dict[int, Stage] = {}
    for index in stages_of_rank(
        mesh.process.rank // mesh.ranks_per_stage,
        degrees.pp,
        num_stages=degrees.num_stages,
        returning=degrees.pp_schedule == "ZBVZeroBubble",
    ):
        stage = _stage(settings, index, mesh, how)
        if mesh.dims is not None:
            _shard(stage, mesh.dims, how.compute_dtype)
        stages[index] = stage
    # in the order of the layers, so that names come in it as well
    stages = dict(sorted(stages.items()))
    *_, final = stages.values()
    if degrees.pp > 1:
        return PipelinedCausalLM(
            stages,
            final.head,
            mesh,
            config=config,
            hf_names=hf_names,
            hidden_dtype=how.compute_dtype,
        )
    return NativeCausalLM(
        config, [final], final.head, multiple_of=degrees.cp * degrees.tp, hf_names=hf_names
    )


def _stage(settings: Decoder.Config, index: int, mesh: TrainingMesh, how: NativeSettings) -> Stage:
    """Make one stage on the meta device, with tensor and expert parallelism."""
    degrees = mesh.config
    layers = divide_layers(len(settings.layers), degrees.num_stages)[index]
    with torch.device("meta"):
        decoder = cast("Decoder", settings.build())
    is_last = index == degrees.num_stages - 1
    keep_only(decoder, layers, first=index == 0, last=is_last)
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(how.dtype)
    if mesh.dims is not None and (degrees.tp > 1 or degrees.ep > 1):
        decoder.parallelize(mesh.dims)
    if how.recompute:
        for layer in decoder.layers.values():
            checkpoint(layer)
    head = cast("nn.Linear", decoder.lm_head) if is_last else None
    if settings.enable_weight_tying:
        decoder._skip_lm_head = True  # pyright: ignore[reportPrivateUsage]
    else:
        decoder.lm_head = None  # pyright: ignore[reportAttributeAccessIssue]
    return Stage(
        decoder,
        head,
        _value_head(settings.dim, how.dtype, is_last=is_last) if how.value_head else None,
        cp_group=mesh.context_group,
        tp_mesh=mesh.dims.get_mesh("tp") if mesh.dims is not None and degrees.tp > 1 else None,
    )


def _value_head(width: int, dtype: torch.dtype, *, is_last: bool) -> nn.Module:
    return make_value_head(width, dtype, "meta") if is_last else ValueHeadElsewhere()


class _RunSettings:
    """The part of a torchtitan run that a model's config looks at."""

    def __init__(self, parallelism: ParallelismConfig) -> None:
        self.parallelism = parallelism


def _shard(stage: Stage, dims: "ParallelDims", compute_dtype: torch.dtype) -> None:
    """Shard a stage with FSDP2; gradients come out as sums over all ranks."""
    outer = ["dp_replicate"] if dims.dp_replicate > 1 else []
    mesh = dims.get_mesh([*outer, "fsdp"])
    apply_fsdp_to_decoder(
        stage.decoder,
        mesh,
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        pp_enabled=dims.pp > 1,
        ep_degree=dims.ep,
        edp_mesh=dims.get_mesh([*outer, "efsdp"]) if dims.ep > 1 else None,
    )
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    if stage.head is not None and not stage.decoder.enable_weight_tying:
        fully_shard(stage.head, mesh=mesh, mp_policy=policy)
    fully_shard(stage, mesh=mesh, mp_policy=policy)
    sum_gradients(stage)
    if dims.pp > 1:
        keep_gathered(stage)


def _start_buffers(model: NativeCausalLM, device: torch.device) -> None:
    """Compute the buffers that no file has; rotary tables are one for all layers."""
    first: dict[Any, RoPE] = {}
    for part in model.modules():
        if isinstance(part, MoE):
            part.tokens_per_expert_E.zero_()
        if isinstance(part, RoPE):
            shared = first.setdefault(repr(part.config), part)
            if shared is part:
                cast("Module", part).init_states(buffer_device=device)
            else:
                part.cache = shared.cache
