"""Context parallelism of denoisers: ranks that share every sample, each with a stretch of tokens.

            block 1       2 ... n                          after the blocks
tokens ─► my stretch ─► attention asks all ranks for keys ─► all tokens, on every rank
                        and values; the rest is by token

What comes before and after the blocks is done alike by all. Every rank has the same loss, and its
gradients are those of what it did: their sum over the ranks, over the number of ranks, is the whole
gradient, which is how the learner counts. Texts are not divided, so that their length is free.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from cosmos_parallel import TrainingMesh, gather_sequence
from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.context_attention import (
    CosmosContextAttention,
    JointContextAttention,
    SanaVideoContextAttention,
    WanContextAttention,
    share_frames,
)
from cosmos_wfm.errors import PipelineError, WfmConfigError
from cosmos_wfm.experts import NoiseExperts, denoisers_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextPlan:
    """How the blocks of a denoiser share a sequence.

    Attributes:
        attention: processor of self-attention, made with the group.
        modules: names of a block's self-attention modules; one that a block does not have is none.
        by_token: arguments of a block, tensors or tuples of them, to the axis of tokens and the
            number of axes; one with other axes, or another length there, is for all tokens.
        frames: argument that counts frames, if blocks need whole ones.
        output: place of the tokens among a block's outputs.
    """

    attention: type[Any]
    modules: Sequence[str]
    by_token: Mapping[str, tuple[int, int]]
    frames: str = ""
    output: int = 0


PLANS: Mapping[str, ContextPlan] = {
    "CosmosTransformer3DModel": ContextPlan(
        attention=CosmosContextAttention,
        modules=("attn1",),
        by_token={
            "embedded_timestep": (1, 3),
            "temb": (1, 3),
            "image_rotary_emb": (0, 2),
            "extra_pos_emb": (1, 3),
        },
    ),
    "SD3Transformer2DModel": ContextPlan(
        attention=JointContextAttention, modules=("attn", "attn2"), by_token={}, output=1
    ),
    "SanaVideoTransformer3DModel": ContextPlan(
        attention=SanaVideoContextAttention,
        modules=("attn1",),
        by_token={"timestep": (1, 3), "rotary_emb": (1, 4)},
        frames="frames",
    ),
    "WanTransformer3DModel": ContextPlan(
        attention=WanContextAttention,
        modules=("attn1",),
        by_token={"rotary_emb": (1, 4), "temb": (1, 4)},
    ),
}
"""Class of a denoiser to its plan."""


def share_context(transformer: nn.Module, blocks: Sequence[nn.Module], mesh: TrainingMesh) -> None:
    """Have the ranks of the axis ``cp`` share every sample; call before sharding, on every rank.

    Args:
        transformer: a denoiser of diffusers, or a copy of one.
        blocks: its blocks, in order.
        mesh: without such an axis nothing happens.

    Raises:
        WfmConfigError: if there is no plan for its class.
    """
    if mesh.dims is None or mesh.config.cp == 1:
        return
    if isinstance(transformer, NoiseExperts):
        for part in transformer.parts.values():
            inside = set(part.modules())
            share_context(part, [block for block in blocks if block in inside], mesh)
        return
    plan, group = _plan_of(transformer, mesh.config.cp), mesh.dims.get_mesh("cp").get_group()
    for place, block in enumerate(blocks):
        for module in plan.modules:
            attention: Any = getattr(block, module, None)
            if attention is not None:
                attention.set_processor(plan.attention(group))
        if plan.frames:
            share_frames(block, group)
        divide = _Divide(block, plan, group, is_first=place == 0)
        block.register_forward_pre_hook(divide, with_kwargs=True)
    blocks[-1].register_forward_hook(_Gather(plan.output, group))


def check_context(adapter: DiffusionModelAdapter, latents: Sequence[int], ranks: int) -> None:
    """Refuse samples that ranks cannot share, before there is a rank.

    Args:
        adapter: the model; its weights may be anywhere.
        latents: shape of a sample's latents, (C, h, w) or (C, f, h, w).
        ranks: of the axis ``cp``.

    Raises:
        WfmConfigError: if there is no plan for the denoiser.
        PipelineError: if its tokens, or latent frames, are no multiple of the ranks.
    """
    if ranks == 1:
        return
    for part in denoisers_of(adapter).values():
        plan = _plan_of(part, ranks)
        # diffusers' mixin is not in nn.Module's type
        patch: int | Sequence[int] = cast("Any", part).config.patch_size
        sides = list(latents[1:])
        patches = [patch] * len(sides) if isinstance(patch, int) else list(patch)[-len(sides) :]
        counts = [side // size for side, size in zip(sides, patches, strict=True)]
        if plan.frames:
            _divided_number(counts[0], "frames", ranks)
        _divided_number(math.prod(counts), "tokens", ranks)


def _plan_of(transformer: nn.Module, ranks: int) -> ContextPlan:
    name = next((c.__name__ for c in type(transformer).__mro__ if c.__name__ in PLANS), "")
    if not name:
        raise WfmConfigError(
            f"parallel.cp is {ranks}, but there is no plan for {type(transformer).__name__}; "
            f"there are plans for {', '.join(PLANS)}"
        )
    return PLANS[name]


def _divided_number(number: int, of: str, ranks: int) -> int:
    if number % ranks:
        raise PipelineError(
            f"a sample of {number} latent {of} cannot be divided among the {ranks} ranks of "
            "parallel.cp; choose another size"
        )
    return number // ranks


class _Divide:
    """Gives a block this rank's part of each argument that goes by tokens."""

    def __init__(
        self, block: nn.Module, plan: ContextPlan, group: ProcessGroup, *, is_first: bool
    ) -> None:
        self._names = list(inspect.signature(block.forward).parameters)
        self._plan = plan
        self._group = group
        self._is_first = is_first

    def __call__(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        ranks, tokens = self._group.size(), given["hidden_states"]
        length = tokens.shape[1] * (1 if self._is_first else ranks)
        if self._plan.frames:
            frames = _divided_number(given[self._plan.frames], "frames", ranks)
            given[self._plan.frames] = frames
        _divided_number(length, "tokens", ranks)
        if self._is_first:
            given["hidden_states"] = self._part(tokens, 1)
        for name, axes in self._plan.by_token.items():
            if name in given:
                given[name] = self._divided(given[name], axes, length)
        return (), given

    def _divided(self, value: Any, axes: tuple[int, int], length: int) -> Any:
        if isinstance(value, tuple | list):
            return tuple(self._divided(each, axes, length) for each in value)
        axis, num = axes
        is_whole = isinstance(value, Tensor) and value.dim() == num and value.shape[axis] == length
        return self._part(value, axis) if is_whole else value

    def _part(self, whole: Tensor, axis: int) -> Tensor:
        return whole.chunk(self._group.size(), dim=axis)[self._group.rank()].contiguous()


class _Gather:
    """Gives what comes after the last block all tokens."""

    def __init__(self, place: int, group: ProcessGroup) -> None:
        self._place = place
        self._group = group

    def __call__(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return gather_sequence(output, self._group)
        parts = list(output)
        parts[self._place] = gather_sequence(parts[self._place], self._group)
        return tuple(parts)
