"""How a denoiser computes: its type, what of it stays exact, compiled or not, sharded over ranks.

Weights, gradients and the optimizer are float32 whatever the computation is (Micikevicius et al.,
arXiv 1710.03740): in bfloat16 each block's weights are cast when FSDP2 gathers them, and gradients
are reduced in float32.

    x, text ─cast─► [block in bfloat16 ... [kept modules in float32] ... ] ─cast─► velocity, float32
    timestep ────────────────────────────────────────────────────────► as it is
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from cosmos_parallel import TrainingMesh, shard_module, sum_gradients
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.experts import NoiseExperts

_EXACT_ARGUMENTS = ("timestep",)
"""A timestep of 999 has no neighbour nearer than 4 in bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeConfig:
    """How the denoiser computes.

    Attributes:
        dtype: of activations and matrix products. ``bfloat16`` keeps float32 weights that are cast
            on the way, and needs a process group, if only of one rank.
        keep_float32: names of modules that compute in float32 nevertheless; a module is one if a
            part of its path is such a name (``norm2`` keeps ``blocks.3.norm2``). Those that the
            model class names itself are kept in any case.
        compile: backend of torch.compile for the blocks, ``inductor`` for instance; empty compiles
            nothing.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    keep_float32: tuple[str, ...] = ()
    compile: str = ""

    def __post_init__(self) -> None:
        """Refuse what has no effect.

        Raises:
            WfmConfigError: if modules are kept from what does not happen, or there is no such
                backend.
        """
        if self.keep_float32 and self.dtype == "float32":
            raise WfmConfigError("compute: keep_float32 means something with dtype = bfloat16 only")
        if self.compile and self.compile not in torch.compiler.list_backends(exclude_tags=None):
            raise WfmConfigError(
                f"compute: there is no backend {self.compile} of torch.compile; there are "
                f"{', '.join(torch.compiler.list_backends())}"
            )


def shard_denoiser(
    module: nn.Module, blocks: Sequence[nn.Module], mesh: TrainingMesh, config: ComputeConfig
) -> None:
    """Compile blocks and shard a denoiser over the mesh, in place; every rank calls.

    Args:
        module: the denoiser, or a copy of it; its parameters in float32.
        blocks: its layers.
        mesh: the ranks.
        config: how it computes.

    Raises:
        WfmConfigError: if bfloat16 is asked for without a process group, or a name of
            ``keep_float32`` is no module's.
    """
    if isinstance(module, NoiseExperts):
        module.share(mesh)
    if config.compile:
        # else a graph for any size may come up between a pass and its recomputation, and differ
        dynamic = False if recomputes(module) else None
        for block in blocks:
            block.compile(backend=config.compile, dynamic=dynamic)
    if config.dtype == "float32":
        shard_module(module, mesh, blocks=blocks)
        return
    if not mesh.is_distributed:
        raise WfmConfigError(
            "compute: bfloat16 over float32 weights needs FSDP2, hence a process group; start with "
            "torchrun, or call init_distributed(0, 1, ...) for a single rank"
        )
    _shard_mixed(module, blocks, mesh, float32_modules(module, config.keep_float32))


def float32_modules(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the outermost modules with weights that are to compute in float32.

    Args:
        module: the denoiser; its class's own list is ``_keep_in_fp32_modules``.
        names: parts of paths, beside that list.

    Raises:
        WfmConfigError: if a name is no module's that has weights.
    """
    own: Sequence[str] = getattr(module, "_keep_in_fp32_modules", None) or ()
    found: dict[str, nn.Module] = {}
    unused = set(names)
    for path, part in module.named_modules():
        matching = set(path.split(".")) & {*own, *names}
        if matching and next(part.parameters(), None) is not None:
            unused -= matching
            if not any(path.startswith(f"{outer}.") for outer in found):
                found[path] = part
    if unused:
        raise WfmConfigError(
            f"compute: keep_float32 names {', '.join(sorted(unused))}, but no module of "
            f"{type(module).__name__} with weights is called that"
        )
    return list(found.values())


def recomputes(module: nn.Module) -> bool:
    """Return whether backward computes activations again, as diffusers' models say it."""
    return any(getattr(part, "gradient_checkpointing", False) for part in module.modules())


def _shard_mixed(
    module: nn.Module, blocks: Sequence[nn.Module], mesh: TrainingMesh, kept: Sequence[nn.Module]
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    low = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # Before FSDP2's own hooks, which want no views: what is cast is none.
    module.register_forward_hook(_cast_outputs(torch.float32))
    for part in kept:
        part.register_forward_hook(_cast_outputs(torch.bfloat16))
        fully_shard(part, mesh=mesh.fsdp_mesh, mp_policy=exact)
        for leaf in part.modules():  # models cast between them, to the type of their activations
            if next(leaf.parameters(recurse=False), None) is not None:
                leaf.register_forward_pre_hook(_cast_to_float32, with_kwargs=True)
    for block in blocks:
        fully_shard(block, mesh=mesh.fsdp_mesh, mp_policy=low)
    fully_shard(module, mesh=mesh.fsdp_mesh, mp_policy=low)
    sum_gradients(module)
    module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)


def _cast_inputs(
    module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    cast_named = {
        name: value if name in _EXACT_ARGUMENTS else _to(value, torch.bfloat16)
        for name, value in named.items()
    }
    return arguments, cast_named


def _cast_to_float32(
    module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    exact = {name: _to(value, torch.float32) for name, value in named.items()}
    return tuple(_to(value, torch.float32) for value in arguments), exact


def _cast_outputs(dtype: torch.dtype) -> Callable[[nn.Module, object, object], object]:
    def cast_them(module: nn.Module, arguments: object, output: object) -> object:
        if isinstance(output, tuple):
            return tuple(_to(value, dtype) for value in cast("tuple[object, ...]", output))
        return _to(output, dtype)

    return cast_them


def _to(value: object, dtype: torch.dtype) -> object:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value
