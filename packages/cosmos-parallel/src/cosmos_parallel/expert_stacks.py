"""Parameters that tensor parallelism splits one by one: stacks of experts, and sinks of attention.

    gate and up   [E, 2 I, H]    rank r has its features of gate, and the same ones of up
    down          [E, H, I]      its columns for those features
    sinks         [heads]        those of its heads

The module that owns them computes as ever, with this rank's parts in their place. All ranks send
every token through every expert that the router chose for it: of what goes into the experts each
rank has a part of the gradient, of what comes out a part of the sum. Adapters are whole on every
rank, and go into the experts like anything else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import (
    _StridedShard,  # type: ignore[reportPrivateUsage]  (as FSDP2 makes them over tp)
)

from cosmos_parallel.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_GATE_AND_UP = 2
# how a plan splits stacks with gate and up one after the other, by features in turn, and of
# matrices that are [in, out]
_JOINED = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
_IN_TURN = {"gate_up_proj": "colwise", "down_proj": "rowwise"}
_TRANSPOSED = {"gate_up_proj": "packed_rowwise", "down_proj": "colwise"}
_APART = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}


def split_experts(
    name: str, experts: nn.Module, mesh: "DeviceMesh", styles: Mapping[str, str]
) -> None:
    """Split the features of a stack of experts, in place; every rank calls.

    Args:
        name: of the module, for errors.
        experts: its results for the features of an expert add up; with adapters around it or not.
        mesh: 1-D.
        styles: of the model's plan, by the names of the stack's own parameters.

    Raises:
        MeshError: if the experts have biases or other parameters that the plan leaves out, are
            stored in another way than it says, or have a number of features that the mesh does not
            divide.
    """
    stack = without_adapters(experts)
    _check_stack(name, stack, styles)
    _split(name, stack, mesh, styles)
    parts = _PartsInPlace(mesh)
    parts.of_module(stack, tuple(styles))
    around = experts
    while around is not stack:
        parts.of_adapter(around, styles[str(around.parameter_name)])
        around = around.get_submodule("base_layer")
    experts.register_forward_pre_hook(parts.take_in, with_kwargs=True)
    experts.register_forward_hook(parts.add_up)
    experts.register_forward_hook(parts.give_back, always_call=True)


def split_own(name: str, module: nn.Module, mesh: "DeviceMesh", styles: Mapping[str, str]) -> None:
    """Split a module's own parameters, in place, and have it compute with its parts of them.

    Args:
        name: of the module, for errors.
        module: it reads the parameters while it computes, and then only.
        mesh: 1-D.
        styles: of the model's plan, by the parameters' names.

    Raises:
        MeshError: if the mesh does not divide one of them.
    """
    _split(name, module, mesh, styles)
    parts = _PartsInPlace(mesh)
    parts.of_module(module, tuple(styles))
    module.register_forward_pre_hook(parts.put_in_place)
    module.register_forward_hook(parts.give_back, always_call=True)


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


def count_once(nothing_done: nn.Module, mesh: "DeviceMesh") -> None:
    """Have an expert that gives back what it is given count once among ranks, not once on each.

    Args:
        nothing_done: within a stack that is split; what comes out of that is summed over ranks.
        mesh: 1-D.
    """

    def share(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] / mesh.size(), *args[1:])

    nothing_done.register_forward_pre_hook(share)


def give_own_output(layer: nn.Module) -> None:
    """Have a split layer give a tensor that can be written to, in place; torch gives a view."""

    def own(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output.clone()

    layer.register_forward_hook(own)


def without_adapters(module: nn.Module) -> nn.Module:
    """Return the stack inside the adapters of it, of which there is one for each parameter."""
    while hasattr(module, "parameter_name"):
        module = module.get_submodule("base_layer")
    return module


def _check_stack(name: str, stack: nn.Module, styles: Mapping[str, str]) -> None:
    found = {own for own, _ in stack.named_parameters()}
    if differing := found ^ set(styles):
        odd = ", ".join(sorted(differing))
        raise MeshError(f"tp: of {name}, the model's plan and its parameters differ in {odd}")
    how: Any = stack  # what transformers' decorator of experts says of them, if it is there
    if not hasattr(how, "is_transposed"):
        known = (_JOINED, _TRANSPOSED, _APART)
    elif how.is_transposed:
        known = (_TRANSPOSED,) if how.is_concatenated else ()
    else:
        known = (_JOINED,) if how.is_concatenated else (_IN_TURN,)
    if dict(styles) not in known:
        raise MeshError(f"tp: the model's plan splits {name} in a way that is not supported")


def _split(name: str, module: nn.Module, mesh: "DeviceMesh", styles: Mapping[str, str]) -> None:
    for own, style in styles.items():
        whole = module.get_parameter(own)
        placement, num_blocks = _placement(style, whole.ndim)
        size = whole.shape[placement.dim] // num_blocks
        if size % mesh.size():
            raise MeshError(f"tp {mesh.size()} does not divide the {size} features of {name}.{own}")
        part = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(own, nn.Parameter(part, requires_grad=whole.requires_grad))


def _placement(style: str, ndim: int) -> tuple[Any, int]:
    """Return where parts of a tensor are, and in how many blocks of it each; Any: a private class.

    A strided shard is a part of each of so many equal blocks.
    """
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


@dataclass(slots=True)
class _Cut:
    """Which part of a factor of an adapter a rank takes: of each of some blocks of one dim."""

    dim: int
    num_blocks: int

    def of(self, whole: Tensor, mesh: "DeviceMesh") -> Tensor:
        blocks = whole.unflatten(self.dim, (self.num_blocks, mesh.size(), -1))
        mine = blocks.select(self.dim + 1, mesh.get_local_rank())
        return mine.flatten(self.dim, self.dim + 1)


@dataclass(slots=True)
class _PartsInPlace:
    """A rank's parts in the place of parameters, while a module computes.

    Attributes:
        mesh: 1-D.
        places: modules and the names of their parameters; with what is cut out of those that are
            whole on every rank (``None``: nothing).
        kept: the parameters that are out of their places.
    """

    mesh: "DeviceMesh"
    places: list[tuple[nn.Module, str, _Cut | None]] = field(default_factory=list)  # type: ignore[assignment]
    kept: list[nn.Parameter] = field(default_factory=list)  # type: ignore[assignment]

    def of_module(self, module: nn.Module, names: tuple[str, ...]) -> None:
        """Take parameters that are split."""
        self.places += [(module, name, None) for name in names]

    def of_adapter(self, adapter: nn.Module, style: str) -> None:
        """Take both factors of peft's adapter of a stack: B makes its rows, A takes its columns."""
        num_blocks = _placement(style, 3)[1]
        makes_features = adapter.parameter_name != "down_proj"
        for factor, cut in (
            ("lora_A", None if makes_features else _Cut(1, num_blocks)),
            ("lora_B", _Cut(0, num_blocks) if makes_features else None),
        ):
            for layer in adapter.get_submodule(factor).children():
                self.places.append((layer, "weight", cut))

    def put_in_place(self, _: nn.Module, __: Any) -> None:
        """Put the parts where the parameters are."""
        self.kept = [module.get_parameter(name) for module, name, _ in self.places]
        for (module, name, cut), whole in zip(self.places, self.kept, strict=True):
            self._put(module, name, self._part(whole, cut))

    def give_back(self, _: nn.Module, __: Any, ___: Any) -> None:
        """Put the parameters back where they were."""
        for (module, name, _cut), whole in zip(self.places, self.kept, strict=False):
            self._put(module, name, whole)
        self.kept = []

    def _put(self, module: nn.Module, name: str, value: Tensor) -> None:
        # a part that is differentiated is no parameter, which alone could be registered
        parameters: dict[str, Tensor] = vars(module)["_parameters"]
        parameters[name] = value

    def take_in(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put the parts in place, and have gradients of all that goes in summed over ranks."""
        self.put_in_place(module, args)

        def taken_in(value: Any) -> Any:
            is_differentiated = isinstance(value, Tensor) and value.requires_grad
            return _whole_with_parts_of_gradient(value, self.mesh) if is_differentiated else value

        return tuple(map(taken_in, args)), {name: taken_in(value) for name, value in kwargs.items()}

    def add_up(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        """Sum what the ranks' features give."""
        parts = DTensor.from_local(output, self.mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local()

    def _part(self, whole: nn.Parameter, cut: _Cut | None) -> Tensor:
        if not isinstance(whole, DTensor):
            given = _whole_with_parts_of_gradient(whole, self.mesh)
            return given if cut is None else cut.of(given, self.mesh)
        part = whole.to_local()
        # parametrizations, of which peft's adapters make use, are of parameters alone
        return part if whole.requires_grad else nn.Parameter(part, requires_grad=False)


def _whole_with_parts_of_gradient(value: Tensor, mesh: "DeviceMesh") -> Tensor:
    whole = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])
