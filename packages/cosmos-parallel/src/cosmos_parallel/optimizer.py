"""Optimizers as config: torch's own by name, Muon, and Adam with 8-bit state from torchao."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmos_parallel.errors import OptimizerError
from cosmos_parallel.joined_optimizer import JoinedOptimizer
from cosmos_parallel.muon import ExpertMuon, check_shares
from cosmos_parallel.schedule import ScheduleConfig

Named = Mapping[str, nn.Parameter]
_OF_WHOLE_PARAMETERS = frozenset({"Adafactor", "Rprop"})
Option = bool | int | float | str | tuple[float, ...]


class _Rates(NamedTuple):
    """The numbers of an optimizer; ``factors`` are those below 1."""

    lr: float
    weight_decay: float = 0.0
    factors: tuple[float, ...] = ()
    eps: float = 0.0


def _check(subject: str, rates: _Rates) -> None:
    at_least_0 = {"lr": rates.lr, "weight_decay": rates.weight_decay, "eps": rates.eps}
    for name, value in at_least_0.items():
        if not 0.0 <= value < math.inf:
            raise OptimizerError(f"{subject}: {name} is {value}; it must be 0 or more")
    for value in rates.factors:
        if not 0.0 <= value < 1.0:
            raise OptimizerError(
                f"{subject}: {value} is no factor of a running mean (betas, momentum); it must be "
                "from 0 to below 1"
            )


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

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            OptimizerError: names the number that is out of range.
        """
        _check("adamw", _Rates(self.lr, self.weight_decay, factors=self.betas, eps=self.eps))

    def build(self, parameters: Named) -> torch.optim.Optimizer:
        """Make the optimizer."""
        fused = _can_be_fused(parameters)
        return torch.optim.AdamW(
            parameters.values(),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=fused,
            foreach=None if fused else False,  # the grouped kernels take no DTensors on CPUs
        )


def _can_be_fused(parameters: Named) -> bool:
    """Whether one kernel takes all of them: alike in device and type, and on one mesh if on any."""
    kinds = {
        (p.device.type, p.dtype, p.device_mesh if isinstance(p, DTensor) else None)
        for p in parameters.values()
    }
    return len(kinds) == 1 and next(iter(kinds))[0] in ("cpu", "cuda")


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

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            OptimizerError: names the number that is out of range.
        """
        _check("sgd", _Rates(self.lr, self.weight_decay, factors=(self.momentum,)))

    def build(self, parameters: Named) -> torch.optim.Optimizer:
        """Make the optimizer."""
        return torch.optim.SGD(
            parameters.values(),
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            foreach=False,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchOptimizerConfig:
    """Any optimizer of ``torch.optim`` that works from gradients alone.

    Torch's Adafactor and Rprop have operations that parameters divided among ranks do not; they
    train on one rank.

    Attributes:
        kind: which optimizer this is.
        name: its class, such as ``RMSprop``, ``Adagrad`` or ``NAdam``.
        lr: peak learning rate.
        options: its other arguments, by name; several numbers are a list, such as ``betas``.
        schedule: factor on ``lr`` over the updates.
    """

    kind: Literal["torch"] = "torch"
    name: str = "Adam"
    lr: float = 1e-3
    options: Mapping[str, Option] = field(default_factory=dict[str, Option])
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        """Look the optimizer and its options up.

        Raises:
            OptimizerError: if torch has no such optimizer, or it has no such option, or the rate or
                what an option is set to is out of range.
        """
        _check(self.name, _Rates(self.lr))
        known = _torch_optimizers()
        if self.name not in known:
            raise OptimizerError(
                f"torch.optim has no {self.name!r} that takes gradients alone; it has "
                f"{', '.join(sorted(known))}"
            )
        ours = {"params", "lr", "differentiable"}  # of steps that nobody differentiates
        taken = set(inspect.signature(known[self.name]).parameters) - ours
        if strange := sorted(set(self.options) - taken):
            raise OptimizerError(
                f"{self.name} takes no {', '.join(strange)}; it takes {', '.join(sorted(taken))}"
            )
        try:
            self.build({"any": nn.Parameter(torch.zeros(1))})
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            raise OptimizerError(f"{self.name} with {dict(self.options)}: {error}") from error

    def build(self, parameters: Named) -> torch.optim.Optimizer:
        """Make the optimizer.

        Raises:
            OptimizerError: if it does not take parameters that ranks share, and some are.
        """
        shared = [name for name, parameter in parameters.items() if isinstance(parameter, DTensor)]
        if shared and self.name in _OF_WHOLE_PARAMETERS:
            raise OptimizerError(
                f"torch's {self.name} does not take parameters that are divided among ranks, as "
                f"{shared[0]} is: train on one rank, or take another optimizer, such as adamw_8bit "
                "where memory is short"
            )
        make = _torch_optimizers()[self.name]
        options = dict(self.options)
        if "foreach" in inspect.signature(make).parameters:
            options = {"foreach": False, **options}
        return make(parameters.values(), lr=self.lr, **options)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW8bitConfig:
    """AdamW whose moments are kept in 8 bits, by blocks (Dettmers et al., 2022; torchao).

    Tensors under 4096 values, or of which a rank holds no whole number of blocks, keep theirs as
    they are. A run goes on to the bit where ranks hold the same parts as before; elsewhere blocks
    are others, and moments are rounded once more.

    Attributes:
        kind: which optimizer this is.
        lr: peak learning rate.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay.
        block_size: values that share a scale.
        stochastic_rounding: round bfloat16 parameters up or down by chance, so that small updates
            are not lost.
        schedule: factor on ``lr`` over the updates.
    """

    kind: Literal["adamw_8bit"] = "adamw_8bit"
    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    block_size: int = 256
    stochastic_rounding: bool = False
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            OptimizerError: names the number that is out of range.
        """
        _check("adamw_8bit", _Rates(self.lr, self.weight_decay, factors=self.betas, eps=self.eps))
        if self.block_size < 1:
            raise OptimizerError(
                f"adamw_8bit: block_size is {self.block_size}; it must be 1 or more"
            )

    def build(self, parameters: Named) -> torch.optim.Optimizer:
        """Make the optimizer.

        Raises:
            OptimizerError: if torchao is not installed.
        """
        try:
            from cosmos_parallel.eight_bit import make_adamw_8bit
        except ImportError as error:
            raise OptimizerError(
                "optimizer adamw_8bit needs torchao: pip install torchao"
            ) from error
        return make_adamw_8bit(
            list(parameters.values()),
            {
                "lr": self.lr,
                "betas": self.betas,
                "eps": self.eps,
                "weight_decay": self.weight_decay,
                "block_size": self.block_size,
                "bf16_stochastic_round": self.stochastic_rounding,
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonConfig:
    """Muon (Jordan et al., 2024) for matrices, AdamW for all else; torch's own of both.

    Updates of matrices are orthogonalised and scaled to the size of AdamW's, so that one learning
    rate serves both (Liu et al., 2025, arXiv 2502.16982, section 2.2). Of a stack of experts each
    has matrices of its own. What a parameter has fused, as gate and up, is one matrix.

    Attributes:
        kind: which optimizer this is.
        lr: peak learning rate, of both.
        momentum: of Muon, with Nesterov's step.
        weight_decay: decoupled decay, of both.
        betas: of AdamW.
        eps: of AdamW.
        adamw_names: a matrix with one of these in its name is AdamW's: embeddings, heads, and
            biases of experts.
        stack_names: a parameter of three dimensions with one of these in its name is a stack of
            matrices; others are AdamW's.
        schedule: factor on ``lr`` over the updates.
    """

    kind: Literal["muon"] = "muon"
    lr: float = 1e-4
    momentum: float = 0.95
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    adamw_names: tuple[str, ...] = (
        "embed",
        "lm_head",
        "wte",
        "wpe",
        "output.weight",
        "value_head",
        "lora_",
        "bias",
    )
    stack_names: tuple[str, ...] = ("experts",)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            OptimizerError: names the number that is out of range.
        """
        _check(
            "muon",
            _Rates(self.lr, self.weight_decay, factors=(self.momentum, *self.betas), eps=self.eps),
        )

    def build(self, parameters: Named) -> torch.optim.Optimizer:
        """Make the optimizer.

        Raises:
            OptimizerError: if more ranks share a matrix than it has rows or columns to share.
        """
        ours = {
            name: parameter
            for name, parameter in parameters.items()
            if not any(part in name for part in self.adamw_names)
        }
        matrices = {name: p for name, p in ours.items() if p.ndim == 2}
        stacks = {
            name: p
            for name, p in ours.items()
            if p.ndim == 3 and any(part in name for part in self.stack_names)
        }
        for name, matrix in (matrices | stacks).items():
            check_shares(name, matrix)
        others = {n: p for n, p in parameters.items() if n not in matrices and n not in stacks}
        parts: list[torch.optim.Optimizer] = []
        options: dict[str, Any] = {
            "lr": self.lr,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "adjust_lr_fn": "match_rms_adamw",
        }
        if matrices:
            parts.append(torch.optim.Muon(matrices.values(), **options))
        if stacks:
            parts.append(ExpertMuon(stacks.values(), **options))
        if others:
            adamw = AdamWConfig(
                lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay
            )
            parts.append(adamw.build(others))
        return JoinedOptimizer(parts)


OptimizerConfig = AdamWConfig | SgdConfig | TorchOptimizerConfig | AdamW8bitConfig | MuonConfig


@runtime_checkable
class KeepsOwnState(Protocol):
    """An optimizer whose state is not kept in plain tensors."""

    def plain(self, value: Tensor) -> Tensor:
        """Return a tensor of the state in float, laid out as it is."""
        ...

    def own(self, parameter: nn.Parameter, quantity: str, value: Tensor) -> Tensor:
        """Return what `plain` gave as this optimizer keeps it."""
        ...


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every group; a rate kept as a tensor stays that tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _torch_optimizers() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    # Any: their constructors have nothing in common but parameters and lr
    found: dict[str, Any] = {
        name: value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    # LBFGS calls the loss again; SparseAdam takes sparse gradients only; Muon takes matrices only
    return {n: v for n, v in found.items() if n not in {"Optimizer", "LBFGS", "SparseAdam", "Muon"}}
