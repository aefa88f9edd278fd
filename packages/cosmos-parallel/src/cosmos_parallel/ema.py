"""An average of a model's weights over training, exponentially weighted towards the newest.

    average ← decay · average + (1 - decay) · weights        after every update

Polyak and Juditsky (1992) for the idea; kept in float32 and laid out like the parameters.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cosmos_parallel.gradients import local_part
from cosmos_parallel.sharding import reshard


@dataclass(frozen=True, kw_only=True, slots=True)
class EmaConfig:
    """How fast the average forgets.

    Attributes:
        decay: weight of the past, below 1; about 1 / (1 - decay) updates are remembered.
        ramp: let the decay rise as (1 + t) / (10 + t), so that the first updates, which are far
            from where training goes, are soon forgotten.
    """

    decay: float = 0.999
    ramp: bool = True

    def __post_init__(self) -> None:
        """Check the range.

        Raises:
            ValueError: if the decay is not in [0, 1).
        """
        if not 0.0 <= self.decay < 1.0:
            raise ValueError(f"ema: decay is {self.decay}; it must be from 0 to below 1")

    def decay_at(self, update: int) -> float:
        """Return the decay at update ``update``, counted from 0."""
        return min(self.decay, (1 + update) / (10 + update)) if self.ramp else self.decay


class Ema:
    """The average of one model's trained parameters.

    Attributes:
        averages: by parameter name, float32; DTensors where the parameters are.
    """

    def __init__(self, model: nn.Module, config: EmaConfig) -> None:
        """Start from the weights as they are."""
        self._config = config
        self._model = model
        self._parameters: Mapping[str, nn.Parameter] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.averages: dict[str, Tensor] = {
            name: parameter.detach().to(torch.float32, copy=True)
            for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew at the weights as they are."""
        for name, parameter in self._parameters.items():
            local_part(self.averages[name]).copy_(local_part(parameter.detach()))

    @torch.no_grad()
    def update(self, update: int) -> None:
        """Take the weights after update ``update``, counted from 0, into the average."""
        kept = self._config.decay_at(update)
        for name, parameter in self._parameters.items():
            part = local_part(parameter.detach()).float()
            local_part(self.averages[name]).lerp_(part, 1.0 - kept)

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Give the model the averages inside the block, to validate or export; every rank enters.

        Weights are put back bit for bit.
        """
        own = {name: local_part(p.detach()).clone() for name, p in self._parameters.items()}
        try:
            self._write({name: local_part(value) for name, value in self.averages.items()})
            yield
        finally:
            self._write(own)

    @torch.no_grad()
    def _write(self, parts: Mapping[str, Tensor]) -> None:
        reshard(self._model)
        for name, part in parts.items():
            local_part(self._parameters[name].detach()).copy_(part)
