"""torchao's 8-bit AdamW, the only module that imports it for an optimizer."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchao.optim import AdamW8bit
from torchao.optim.quant_utils import quantize_8bit_with_qmap
from torchao.optim.subclass_8bit import OptimState8bit

from cosmos_parallel.gradients import laid_out_like, local_part

_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
_LEAST_SCALE = 1e-12  # torchao's, of a block of zeros


class PlainStateAdamW8bit(AdamW8bit):
    """torchao's optimizer, with its state to be had in float, as checkpoints keep it.

    Where parameters are divided as they were, reading a state back gives it to the bit.
    """

    @staticmethod
    def _subclass_zeros(p: Tensor, signed: bool, block_size: int) -> OptimState8bit:
        """Make zeros that look like float32, whatever the parameter is.

        It is codes and scales either way. As bfloat16, ``float()`` would change the looks, of which
        a DTensor around it does not learn, and then refuses to be added to float32.
        """
        return OptimState8bit.zeros(p.shape, signed, block_size, p.device, dtype=torch.float32)

    def plain(self, value: Tensor) -> Tensor:
        """Return a tensor of the state in float, laid out as it is."""
        local = local_part(value)
        if type(local) is Tensor:
            return value
        return laid_out_like(value, local.dequantize())

    def own(self, parameter: nn.Parameter, quantity: str, value: Tensor) -> Tensor:
        """Return what `plain` gave as this optimizer keeps it."""
        if quantity not in _SIGNED:
            return value
        kept: Tensor = self._new_buffer(parameter.detach(), _SIGNED[quantity])
        local, given = local_part(kept), local_part(value)
        if isinstance(local, OptimState8bit):
            _encode(local, given)
        else:
            local.copy_(given)
        return kept


def _encode(kept: OptimState8bit, values: Tensor) -> None:
    """Find codes and scales of values that are products of such.

    torchao's own copy takes the largest magnitude of a block for its scale. Where that is of a
    negative value it is not: -1 has no code, and the one next to it is 0.7 % nearer to 0. What that
    is divided by misses the scale by its last bit at times, so the bits beside are tried as well.
    """
    blocks = values.float().reshape(-1, kept.block_size)
    scale = blocks.amax(-1)
    if kept.signed:
        lowest = -blocks.amin(-1)
        scale = torch.where(scale > lowest, scale, lowest / -kept.qmap[0])
    scale = scale.clip(min=_LEAST_SCALE)
    tried = [scale, *(scale.nextafter(torch.full_like(scale, end)) for end in (0.0, math.inf))]
    fewest = torch.full_like(scale, math.inf)
    for each in tried:
        codes = quantize_8bit_with_qmap(blocks / each[:, None], kept.qmap)
        misses = (kept.qmap[codes.int()] * each[:, None] != blocks).sum(-1)
        better = misses < fewest
        fewest = torch.where(better, misses.float(), fewest)
        kept.scale.copy_(torch.where(better, each, kept.scale))
        chosen = torch.where(better[:, None], codes, kept.codes.view_as(codes))
        kept.codes.copy_(chosen.view_as(kept.codes))


class _EagerAdamW8bit(PlainStateAdamW8bit):
    """On a CPU: torchao compiles its update, which costs a minute of C++ there and gains little."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Take a step without the compiler."""
        with torch.compiler.set_stance("force_eager"):
            super().step(closure)


def make_adamw_8bit(
    parameters: Sequence[nn.Parameter],
    options: Mapping[str, Any],  # torchao's own arguments
) -> torch.optim.Optimizer:
    """Make the optimizer, compiled where there is an accelerator."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    return (_EagerAdamW8bit if on_cpu else PlainStateAdamW8bit)(parameters, **options)
