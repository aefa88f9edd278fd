"""What a denoiser is asked: tokens and floating-point operations of its passes, as it runs.

Operations are counted once for each shape of arguments, by looking at every matrix product,
convolution and attention of that pass; it computes as otherwise.

Compiled blocks are looked at as they were before. Where the backward pass runs them again, both
runs have to be of one kind: they are then left uncompiled from one `take` to the next, at first and
after a shape that was not known.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from cosmos_wfm.denoiser import recomputes
from cosmos_wfm.experts import NoiseExperts

_COMPILED = "_compiled_call_impl"
"""Where ``nn.Module.compile`` puts what is called in the module's place."""
_OF_A_TRAINED_PASS = 3
"""Forward, and twice that backward: for inputs and for weights (Kaplan et al., 2020)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """What was asked for in some passes of this rank.

    Attributes:
        tokens: positions that the blocks of a denoiser worked on, in passes with gradient; 0 where
            its blocks have no sequence of them.
        flops: floating-point operations, of a pass with gradient backward too.
    """

    tokens: float
    flops: float


class PassMeter:
    """Counts the passes of denoisers from now on."""

    def __init__(self, denoisers: Sequence[tuple[nn.Module, Sequence[nn.Module]]]) -> None:
        """Watch denoisers, each given with its blocks.

        Those that consist of two are watched one by one.
        """
        self._known: dict[tuple[object, ...], Passes] = {}
        self._key: tuple[object, ...] = ()
        self._counting: _Counting | None = None
        self._tokens = self._flops = 0.0
        self._has_all = True
        self._looks = True
        self._set_aside: dict[nn.Module, Any] = {}
        self._blocks: dict[nn.Module, Sequence[nn.Module]] = {}
        for module, blocks in denoisers:
            parts = module.parts.values() if isinstance(module, NoiseExperts) else [module]
            for part in parts:
                own = set(part.modules())
                self._blocks[part] = [block for block in blocks if block in own] or [part]
                part.register_forward_pre_hook(self._begin, with_kwargs=True)
                part.register_forward_hook(self._end, always_call=True)

    def take(self) -> Passes:
        """Return what was counted since the last time; nothing if a pass could not be.

        No backward pass may be left to come.
        """
        for block, compiled in self._set_aside.items():
            vars(block)[_COMPILED] = compiled
        self._set_aside = {}
        self._looks = not (self._known and self._has_all)
        share = 1.0 if self._has_all else 0.0
        taken = Passes(tokens=share * self._tokens, flops=share * self._flops)
        self._tokens = self._flops = 0.0
        self._has_all = True
        return taken

    def _begin(self, module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self._key = (id(module), *(tuple(each.shape) for each in _tensors(args, named)))
        if self._looks and self._is_computed_again(module):
            self._set_aside |= _uncompiled(self._blocks[module])
        if self._key not in self._known and not self._is_computed_again(module):
            self._counting = _Counting(self._blocks[module])
            self._counting.__enter__()

    def _is_computed_again(self, module: nn.Module) -> bool:
        """Return whether the backward pass runs compiled blocks again.

        Where they are looked at they are not compiled, and would not save the same tensors.
        """
        is_compiled = _COMPILED in vars(self._blocks[module][0])
        return is_compiled and torch.is_grad_enabled() and recomputes(module)

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        if self._counting is not None:
            self._counting.__exit__(None, None, None)
            self._known[self._key] = self._counting.end()
            self._counting = None
        if self._key not in self._known:
            self._has_all = False
            return
        known, is_trained = self._known[self._key], torch.is_grad_enabled()
        self._flops += known.flops * (_OF_A_TRAINED_PASS if is_trained else 1)
        self._tokens += known.tokens if is_trained else 0.0


def _uncompiled(blocks: Sequence[nn.Module]) -> dict[nn.Module, Any]:
    """Have blocks run as they were before they were compiled; return what puts that back."""
    return {block: vars(block).pop(_COMPILED) for block in blocks if _COMPILED in vars(block)}


class _Counting(TorchDispatchMode):
    """Adds up what is computed inside, and sees what the first block is given.

    Compiled blocks are called as they were before: torch.compile, which looks into no such mode,
    would take it that they cannot be compiled at all. The first has a hook for that pass only,
    which would be compiled with the block if it stayed.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self._flops = self._tokens = 0.0
        self._compiled = _uncompiled(blocks)
        self._hook = blocks[0].register_forward_pre_hook(self._see_tokens, with_kwargs=True)

    def end(self) -> Passes:
        """Leave everything as it was; return what was seen."""
        self._hook.remove()
        for block, compiled in self._compiled.items():
            vars(block)[_COMPILED] = compiled
        return Passes(tokens=self._tokens, flops=self._flops)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute, and count."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what it does with its parts is seen
        result = func(*args, **(kwargs or {}))
        count = _COUNTS.get(getattr(func, "_overloadpacket", None))
        if count is not None:
            self._flops += count(*args, **(kwargs or {}), out_val=result)
        return result

    def _see_tokens(
        self, block: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        hidden = next(_tensors(args, {"": named.get("hidden_states")}), None)
        if hidden is not None and hidden.dim() == 3:
            self._tokens = math.prod(hidden.shape[:2])


def _attention_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, *_: object, out_val: object = None, **__: object
) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


_COUNTS: Mapping[object, Callable[..., float]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_cpu,
}
"""Of torch's own table, and what it lacks."""


def _tensors(args: Sequence[Any], named: Mapping[str, Any]) -> Iterator[Tensor]:
    for each in (*args, *named.values()):
        if isinstance(each, Tensor):
            yield each
