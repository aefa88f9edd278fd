"""torchao's 8-bit AdamW, the only module that imports it for an optimizer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchao.optim import AdamW8bit

from cosmos_parallel.gradients import laid_out_like, local_part

_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class PlainStateAdamW8bit(AdamW8bit):
    """torchao's optimizer, with its state to be had in float, as checkpoints keep it.

    Writing a state down in float and reading it back gives it to the rounding of one code: blocks
    whose largest value is negative get a scale that is 0.7 % smaller, as -1 has no code.
    """

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
        local_part(kept).copy_(local_part(value))
        return kept


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
