"""Tensor parallelism for models of transformers, by the model's own ``tp_plan``; names stay."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
)

from cosmos_parallel.errors import MeshError
from cosmos_parallel.expert_stacks import (
    count_once,
    give_own_output,
    split_experts,
    split_own,
    sum_gradient_of_last,
    without_adapters,
)
from cosmos_parallel.families import tensor_plan
from cosmos_parallel.lora import layers_to_split
from cosmos_parallel.sequence_parallel import divide_rows
from cosmos_parallel.split_layers import norm_of_parts, split_layer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

# what works on the features that a split matrix has made, by the name of that matrix
_NORMS = dict.fromkeys(("q_norm", "k_norm", "q_layernorm", "k_layernorm"), "q_proj")
_BEHIND = {**_NORMS, "act_fn": "up_proj"}
# experts that compute nothing are seen to with the stack they are in, whatever adapters it has
_NOT_SPLIT = (None, "embedding_rowwise", "moe_identity_expert")
# Llama 4 adds the routed experts to what the shared one gives, in its place
_WRITTEN_TO = ".shared_expert.down_proj"


def apply_tensor_plan(
    model: "PreTrainedModel", mesh: "DeviceMesh", *, rows_too: bool = False
) -> None:
    """Split the matrices of a model as its ``tp_plan`` says, in place; every rank calls.

    Args:
        model: whole, the same on every rank.
        mesh: 1-D.
        rows_too: divide rows between the parts of a layer; see `divide_rows`.

    Raises:
        MeshError: if the plan has a style that is not known here, or leaves out what ranks must do
            together.
    """
    plan = _plan_of(model, mesh.size())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = getattr(head, "weight", None) is embedding.weight
    for name, module in list(model.named_modules()):
        style = plan.get(_pattern(name))
        own = _styles_of_own(plan, name, module)
        if style == "moe_tp_experts" or "down_proj" in own:
            split_experts(name, module, mesh, own)
            _count_idle_experts_once(module, mesh, plan, name)
        elif own:
            split_own(name, module, mesh, own)
        # embeddings stay whole, also where they are the head: FSDP2 shards them
        elif _stays_whole(model, name, plan) or (tied and module is head):
            continue
        elif style == "mla_kv_a_proj":
            sum_gradient_of_last(module, mesh, model.config.get_text_config().qk_rope_head_dim)
        else:
            for layer in layers_to_split(_linear_within(module), plan[_pattern(name)]):
                split_layer(layer, mesh, _style(plan[_pattern(name)]))
            if name.endswith(_WRITTEN_TO):
                give_own_output(module)
    if rows_too:
        divide_rows(model, mesh)


def _plan_of(model: "PreTrainedModel", num_ranks: int) -> Mapping[str, str]:
    """Return styles by the names of modules, in which ``*`` stands for a number.

    Some plans forget norms of queries and keys (that of Qwen3-VL-MoE) or activations
    that are learned (Apertus): each rank's gradient would be of its own features, and the ranks'
    weights would go apart.
    """
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    within = tensor_plan(model.config.get_text_config())
    plan = dict(model.tp_plan) | {f"{prefix}.{name}": style for name, style in within.items()}
    for name, module in model.named_modules():
        block, _, own = name.rpartition(".")
        maker = plan.get(_pattern(f"{block}.{_BEHIND.get(own)}"))
        is_learned = next(module.parameters(), None) is not None
        if maker == "colwise" and is_learned and _pattern(name) not in plan:
            if own in _NORMS:
                _check_head_norm(name, module, model.get_submodule(block))
            plan[_pattern(name)] = "replicated_with_grad_allreduce"
        if plan.get(_pattern(f"{name}.q_proj")) == "colwise":
            _check_own_weights(name, module, plan)
            _check_heads(name, module, num_ranks)
    return plan


def _count_idle_experts_once(
    stack: nn.Module, mesh: "DeviceMesh", plan: Mapping[str, str], name: str
) -> None:
    for part, expert in without_adapters(stack).named_children():
        if plan.get(f"{_pattern(name)}.{part}") == "moe_identity_expert":
            count_once(expert, mesh)


def _stays_whole(model: nn.Module, name: str, plan: Mapping[str, str]) -> bool:
    style = plan.get(_pattern(name))
    return style in _NOT_SPLIT or (style == "rowwise" and not _is_given_parts(model, name, plan))


def _linear_within(layer: nn.Module) -> nn.Module:
    """Return the linear layer of one that bounds what goes into it and comes out (Gemma 4)."""
    inner = getattr(layer, "linear", None)
    return inner if isinstance(inner, nn.Module) else layer


def _is_given_parts(model: nn.Module, name: str, plan: Mapping[str, str]) -> bool:
    """Whether the plan splits what stands before an output layer that it splits.

    Of layers that differ one pattern may name them all: GLM-5.3's plan is for those that attend,
    and its linear ones have an output layer of the same name.
    """
    block, _, _own = name.rpartition(".")
    before = [part for part, _ in model.get_submodule(block).named_modules(prefix=block)]
    return any(plan.get(_pattern(part), "").startswith("colwise") for part in before)


def _styles_of_own(plan: Mapping[str, str], name: str, module: nn.Module) -> dict[str, str]:
    """Return styles of those of a module's own parameters that the plan names by themselves."""
    owner = without_adapters(module)
    names = {own: f"{_pattern(name)}.{own}" for own, _ in owner.named_parameters(recurse=False)}
    return {own: plan[full] for own, full in names.items() if full in plan}


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _check_head_norm(name: str, norm: nn.Module, attention: nn.Module) -> None:
    """Refuse a norm over more than one head, or with weights for each, which no style divides."""
    size = getattr(attention, "head_dim", None)
    for weight in norm.parameters():
        if weight.ndim > 1 or weight.numel() != (size or weight.numel()):
            raise MeshError(f"tp: {name} has weights for more than one head; use dp_shard or cp")


def _check_own_weights(name: str, attention: nn.Module, plan: Mapping[str, str]) -> None:
    """Refuse attention with weights beside its layers, such as sinks, which no style divides."""
    for own, _ in attention.named_parameters(recurse=False):
        if f"{_pattern(name)}.{own}" in plan:
            continue
        raise MeshError(
            f"tp: {name} has {own} for all heads, which the model's plan does not split; use "
            "dp_shard or cp"
        )


def _check_heads(name: str, attention: nn.Module, num_ranks: int) -> None:
    """Refuse heads that ranks would have parts of; layers of one model may differ in theirs."""
    size = getattr(attention, "head_dim", None)
    for own in ("q_proj", "k_proj", "v_proj"):
        layer = getattr(attention, own, None)
        features = getattr(layer and _linear_within(layer), "out_features", None)
        if size and features and features % (size * num_ranks):
            raise MeshError(
                f"tp {num_ranks} does not divide the {features // size} heads of {name}.{own}"
            )


def _style(name: str) -> ParallelStyle:
    match name:
        case "colwise":
            return ColwiseParallel()
        case "colwise_gather_output":
            return ColwiseParallel(output_layouts=Replicate())
        case "rowwise":
            return RowwiseParallel()
        case "rowwise_split_input":
            return RowwiseParallel(input_layouts=Replicate())
        case "replicated_with_grad_allreduce":
            return norm_of_parts()
        case _:
            raise MeshError(f"tp: this model splits by {name}, which is not supported")
