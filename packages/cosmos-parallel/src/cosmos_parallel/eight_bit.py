"""torchao's 8-bit AdamW, the only module that imports it for an optimizer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchao.optim import AdamW8bit


class _EagerAdamW8bit(AdamW8bit):
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
    return (_EagerAdamW8bit if on_cpu else AdamW8bit)(parameters, **options)
