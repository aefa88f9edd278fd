"""Parameters that tensor parallelism splits one by one: stacks of experts, and sinks of attention.

    gate and up   [E, 2 I, H]    rank r has its features of gate, and the same ones of up
    down          [E, H, I]      its columns for those features
    sinks         [heads]        those of its heads

The module that owns them computes as ever, with this rank's parts in their place. All ranks send
every token through every expert that the router chose for it: of what goes into the experts each
rank has a part of the gradient, of what comes out a part of the sum.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from cosmos_parallel.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_GATE_AND_UP = 2
# how the plan splits what experts have, if their matrices are [out, in] or the other way round,
# with gate and up one after the other, or feature by feature
_IN_TURN = {"gate_up_proj": "colwise", "down_proj": "rowwise"}
_JOINED = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
_TRANSPOSED = {"gate_up_proj": "packed_rowwise", "down_proj": "colwise"}


def split_experts(
    name: str, experts: nn.Module, mesh: "DeviceMesh", styles: Mapping[str, str]
) -> None:
    """Split the features of a stack of experts, in place; every rank calls.

    Args:
        name: of the module, for errors.
        experts: called with hidden states first, and maybe with what the router says; of its
            results, those of the features of an expert add up.
        mesh: 1-D.
        styles: of the model's plan, by the names of the module's own parameters.

    Raises:
        MeshError: if the experts have adapters, biases or other parameters that the plan leaves
            out, are stored in another way than it says, or have a number of features that the mesh
            does not divide.
    """
    _check_stack(name, experts, styles)
    split_own(name, experts, mesh, styles)
    experts.register_forward_pre_hook(partial(_sum_gradients_of_inputs, mesh), with_kwargs=True)
    experts.register_forward_hook(partial(_sum_outputs, mesh))


def split_own(name: str, module: nn.Module, mesh: "DeviceMesh", styles: Mapping[str, str]) -> None:
    """Split a module's own parameters, in place, and have it compute with its parts of them.

    Args:
        name: of the module, for errors.
        module: it reads the parameters as its attributes, while it computes and then only.
        mesh: 1-D.
        styles: of the model's plan, by the parameters' names.

    Raises:
        MeshError: if the mesh does not divide one of them.
    """
    for own, style in styles.items():
        whole = module.get_parameter(own)
        placement, num_pieces = _placement(style, whole.ndim)
        size = whole.shape[placement.dim]
        if size % (num_pieces * mesh.size()):
            raise MeshError(
                f"tp {mesh.size()} does not divide the {size // num_pieces} features of {name}.{own}"
            )
        part = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
        split = nn.Parameter(part, requires_grad=whole.requires_grad)
        module.register_parameter(own, split)
    names = tuple(styles)
    module.register_forward_pre_hook(partial(_take_parts, names))
    module.register_forward_hook(partial(_give_back, names), always_call=True)


def sum_gradient_of_last(layer: nn.Module, mesh: "DeviceMesh", num_last: int) -> None:
    """Have the gradient of a layer's last features summed over ranks, in place.

    Latent attention makes keys' rotary part, which all heads share, in the layer that makes the
    latent; the latent goes on through a split layer, which sums its gradient, and this does not.

    Args:
        layer: whole on every rank; its output is [..., features].
        mesh: 1-D.
        num_last: how many features go to the rank's heads as they are.
    """

    def sum_last(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        latent, rotary = output.split([output.shape[-1] - num_last, num_last], dim=-1)
        return torch.cat([latent, _whole_with_parts_of_gradient(rotary, mesh)], dim=-1)

    layer.register_forward_hook(sum_last)


def _check_stack(name: str, experts: nn.Module, styles: Mapping[str, str]) -> None:
    found = {own for own, _ in experts.named_parameters()}
    if any("lora_" in own for own in found):
        raise MeshError(
            f"tp: {name} has adapters, and those of stacks of experts are not split; name other "
            "layers in lora's targets, or use dp_shard"
        )
    if found != styles.keys():
        odd = ", ".join(sorted(found ^ styles.keys()))
        raise MeshError(f"tp: of {name}, the model's plan and its parameters differ in {odd}")
    how: Any = experts  # what transformers' decorator of experts says of them, if it is there
    if not hasattr(how, "is_transposed"):
        known = (_JOINED, _TRANSPOSED)
    elif how.is_transposed:
        known = (_TRANSPOSED,) if how.is_concatenated else ()
    else:
        known = (_JOINED,) if how.is_concatenated else (_IN_TURN,)
    if dict(styles) not in known:
        raise MeshError(f"tp: the model's plan splits {name} in a way that is not supported")


def _placement(style: str, ndim: int) -> tuple[Any, int]:
    """Return where the ranks' parts are, and of how many pieces each; Any: a private class."""
    rows, columns = max(ndim - 2, 0), ndim - 1
    match style:
        case "colwise":
            return Shard(rows), 1
        case "rowwise":
            return Shard(columns), 1
        case "packed_colwise":
            return _StridedShard(rows, split_factor=_GATE_AND_UP), _GATE_AND_UP
        case "packed_rowwise":
            return _StridedShard(columns, split_factor=_GATE_AND_UP), _GATE_AND_UP
        case _:
            raise MeshError(f"tp: this model splits parameters by {style}, which is not supported")


def _take_parts(names: tuple[str, ...], module: nn.Module, _: Any) -> None:
    for name in names:
        whole = module.get_parameter(name)
        assert isinstance(whole, DTensor)
        # an attribute of the instance is found before a parameter of that name
        vars(module)[name] = whole.to_local()


def _give_back(names: tuple[str, ...], module: nn.Module, _: Any, __: Any) -> None:
    for name in names:
        vars(module).pop(name, None)


def _sum_gradients_of_inputs(
    mesh: "DeviceMesh", _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def taken_in(value: Any) -> Any:
        is_differentiated = isinstance(value, Tensor) and value.requires_grad
        return _whole_with_parts_of_gradient(value, mesh) if is_differentiated else value

    return tuple(map(taken_in, args)), {name: taken_in(value) for name, value in kwargs.items()}


def _sum_outputs(mesh: "DeviceMesh", _: nn.Module, __: Any, output: Tensor) -> Tensor:
    parts: list[Placement] = [Partial()]
    summed = DTensor.from_local(output, mesh, parts, run_check=False)
    return summed.redistribute(placements=[Replicate()]).to_local()


def _whole_with_parts_of_gradient(value: Tensor, mesh: "DeviceMesh") -> Tensor:
    whole = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])
