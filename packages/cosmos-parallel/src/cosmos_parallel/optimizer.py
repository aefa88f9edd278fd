"""Optimizers and learning-rate schedules, as config."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Factor on the learning rate: linear warm-up, then a shape.

    Attributes:
        shape: ``constant``, or ``cosine`` or ``linear`` decay from 1 to ``final_factor``.
        num_warmup_steps: updates over which the factor rises; update i of w has (i + 1) / w.
        num_steps: update at which the decay ends; unused by ``constant``.
        final_factor: factor from then on.
    """

    shape: Literal["constant", "cosine", "linear"] = "constant"
    num_warmup_steps: int = 0
    num_steps: int = 0
    final_factor: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers against each other.

        Raises:
            ValueError: if a decay has no steps left after the warm-up.
        """
        if self.num_warmup_steps < 0:
            raise ValueError(f"num_warmup_steps is {self.num_warmup_steps}; it must be 0 or more")
        if self.shape != "constant" and self.num_steps <= self.num_warmup_steps:
            raise ValueError(
                f"a {self.shape} schedule needs num_steps above num_warmup_steps "
                f"({self.num_warmup_steps}); found {self.num_steps}"
            )

    def factor(self, update: int) -> float:
        """Return the factor of update ``update``, counted from 0."""
        if update < self.num_warmup_steps:
            return (update + 1) / self.num_warmup_steps
        if self.shape == "constant":
            return 1.0
        length = self.num_steps - self.num_warmup_steps
        progress = min((update - self.num_warmup_steps) / length, 1.0)
        kept = (1 + math.cos(math.pi * progress)) / 2 if self.shape == "cosine" else 1 - progress
        return self.final_factor + (1 - self.final_factor) * kept


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWConfig:
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2); the decay applies to every parameter.

    Attributes:
        kind: which optimizer this is.
        lr: peak learning rate.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay.
        schedule: factor on ``lr`` over the updates.
    """

    kind: Literal["adamw"] = "adamw"
    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer."""
        # for loops: the grouped kernels do not take DTensors on CPU
        return torch.optim.AdamW(
            parameters,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            foreach=False,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SgdConfig:
    """Gradient descent with optional momentum.

    Attributes:
        kind: which optimizer this is.
        lr: peak learning rate.
        momentum: factor on the running sum of gradients.
        weight_decay: L2 penalty.
        schedule: factor on ``lr`` over the updates.
    """

    kind: Literal["sgd"] = "sgd"
    lr: float = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer."""
        return torch.optim.SGD(
            parameters,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            foreach=False,
        )


OptimizerConfig = AdamWConfig | SgdConfig
