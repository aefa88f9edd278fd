"""The learner: one optimizer step from any loss that returns a sum and its weight.

It knows no algorithm. Un-normalised sums are accumulated over micro-batches, ranks and replicas,
and divided once by the global weight, so every layout takes the step that one process would take.

    replica 0, rank 0:  b0 b1 b2 ─┐ sum of ∇total    (FSDP2: over ranks)
    replica 0, rank 1:  b3 b4 (-) ┤ ───────────────► ┐ sum over replicas
    replica 1, rank 0:  b5 ...    ┘ ───────────────► ┴─► ∇ / Σ weight ─► clip ─► update
                         (-) a pass of weight 0: ranks must pass equally often
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmos_parallel.ema import Ema, EmaConfig
from cosmos_parallel.errors import (
    LossContractError,
    MeshError,
    NoBatchError,
    NonFiniteStepError,
    OptimizerError,
)
from cosmos_parallel.gradients import finish_gradients, gradient_squares, sum_over_replicas
from cosmos_parallel.mesh import ParallelConfig, TrainingMesh, build_mesh
from cosmos_parallel.non_finite import BadStep
from cosmos_parallel.optimizer import AdamWConfig, OptimizerConfig, set_learning_rate
from cosmos_parallel.passes import (
    LossFunction,
    LossResult,
    Pass,
    Scorer,
    passes_over,
    run_passes,
)
from cosmos_parallel.replicas import ReplicaGroup
from cosmos_parallel.step_report import Evaluation, Outcome, StepReport

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """How gradients become updates.

    Attributes:
        optimizer: the update rule, with its learning-rate schedule.
        max_grad_norm: global norm to which gradients are clipped; infinity never clips.
        max_non_finite_steps: steps in a row that may be skipped because a loss or gradient was
            not finite; one more is an error.
        dump_directory: where the batches of such steps are written, to be looked at; ``None``
            writes none.
        ema: an average of the weights that is kept beside them, and is what runs validate and
            export; ``None`` keeps none.
        offload_activations: keep what backward needs in host memory.
    """

    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    max_grad_norm: float = 1.0
    max_non_finite_steps: int = 3
    dump_directory: Path | None = None
    ema: EmaConfig | None = None
    offload_activations: bool = False

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: if the norm is not positive or the count negative.
        """
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {self.max_grad_norm}; it must be above 0")
        if self.max_non_finite_steps < 0:
            raise ValueError(
                f"max_non_finite_steps is {self.max_non_finite_steps}; it must be 0 or more"
            )


@dataclass(slots=True)
class _Sums:
    total: Tensor
    weight: Tensor
    metrics: dict[str, Tensor]
    totals: list[Tensor] = field(default_factory=list[Tensor])

    def add(self, result: LossResult) -> None:
        self.totals.append(result.total.detach())
        self.total += result.total.detach().double()
        self.weight += result.weight.detach().double()
        for name, value in result.metrics.items():
            self.touch(name)
            self.metrics[name] += value.detach().double()

    def touch(self, name: str) -> None:
        if name not in self.metrics:
            self.metrics[name] = torch.zeros_like(self.total)

    def pack(self) -> Tensor:
        return torch.stack([self.total, self.weight, *(v for _, v in sorted(self.metrics.items()))])


class Learner:
    """Trains one model on this rank; all ranks of all replicas call ``step`` together.

    Attributes:
        model: the module being trained; its parameters change in place.
        mesh: the ranks of this replica.
        replica_group: the policy replicas; may be exchanged between steps.
        optimizer: the torch optimizer over its trainable parameters.
        optimizer_config: what it was made from.
        num_updates: updates made so far; the position in the learning-rate schedule.
        num_skipped: steps so far whose loss or gradient was not finite.
        num_skipped_in_a_row: how many of these were the last ones.
        ema: the average of the weights, if one is kept.
        companion: a frozen model that is part of the state, such as a reference that moves: it is
            saved, restored and sent to replicas that join, or of one with adapters only these;
            ``None`` unless the caller sets it.
    """

    def __init__(
        self,
        model: nn.Module,
        config: LearnerConfig,
        *,
        mesh: TrainingMesh | None = None,
        replica_group: ReplicaGroup | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make the optimizer for ``model``, which the learner does not own.

        Args:
            model: plain, or sharded over ``mesh``.
            config: how to update.
            mesh: the ranks of this replica; ``None`` for this process by itself.
            replica_group: the policy replicas; ``None`` for one.
            clock: seconds, for the reports.

        Raises:
            OptimizerError: if no parameter takes a gradient.
            MeshError: if ranks have different data, and a parameter is not sharded.
        """
        self.model = model
        self.num_updates = 0
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        self.replica_group = replica_group
        self._config = config
        self.mesh = mesh or build_mesh(ParallelConfig())
        self._clock = clock
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise OptimizerError(
                f"{type(model).__name__} has nothing to train: none of its parameters has "
                "requires_grad"
            )
        _check_shared(trained, self.mesh)
        self._parameters = list(trained.values())
        self.optimizer_config = config.optimizer
        self.optimizer = config.optimizer.build(trained)
        self.ema = Ema(model, config.ema) if config.ema else None
        self.companion: nn.Module | None = None

    def step(
        self,
        batches: Sequence[Batch],
        loss: LossFunction[Batch],
        *,
        filler: Batch | None = None,
        scorers: Sequence[Scorer[Batch]] = (),
    ) -> StepReport:
        """Take one optimizer step on this rank's micro-batches.

        Ranks may have different numbers of micro-batches, or none: those with fewer repeat
        ``filler``, or else their last batch, with weight 0, as the collectives inside the model
        must match.

        Args:
            batches: this rank's share, in order.
            loss: called as ``loss(model, batch)`` once per pass.
            filler: a batch of weight 0, for ranks that have none of their own.
            scorers: frozen models, of which the batches that ``loss`` sees have scores.

        Raises:
            NoBatchError: on every rank, if one has neither batches nor a filler; or if a tensor
                stands for the list of micro-batches.
            LossContractError: if the loss did not return scalar sums with a gradient.
            NonFiniteStepError: if too many steps in a row were not finite.
            ReplicaLostError: if another replica did not take part; nothing is updated.
        """
        started, batches = self._clock(), _listed(batches)
        spare = filler if filler is not None else (batches[-1] if batches else None)
        num_passes = self._agree_on_passes(len(batches), has_spare=spare is not None)
        self.optimizer.zero_grad(set_to_none=True)
        passes = passes_over(batches, spare, num_passes)
        sums = self._accumulate(passes, loss, scorers)
        total, weight, metrics, squares = self._reduce(sums)
        lr = self._config.optimizer.lr * self._config.optimizer.schedule.factor(self.num_updates)
        outcome, grad_norm = self._update(total, weight, lr, squares)
        problem = ""
        if outcome == "non_finite":
            bad = BadStep(
                model=self.model,
                passes=passes,
                totals=sums.totals,
                again=lambda each: self._accumulate([each], loss, scorers),
                mesh=self.mesh,
                replica_group=self.replica_group,
            )
            problem = self._account_for(bad, f"loss sum {total}, gradient norm {grad_norm}")
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport(
            outcome=outcome,
            loss=total / weight if weight else 0.0,
            weight=weight,
            grad_norm=grad_norm,
            lr=lr,
            metrics=metrics,
            num_passes=num_passes,
            seconds=self._clock() - started,
            num_skipped=self.num_skipped,
            problem=problem,
        )

    def evaluate(
        self,
        batches: Sequence[Batch],
        loss: LossFunction[Batch],
        *,
        filler: Batch | None = None,
        scorers: Sequence[Scorer[Batch]] = (),
    ) -> Evaluation:
        """Return the loss over the batches of this replica's ranks; nothing is trained.

        Called by all ranks of this replica, and by no other replica; arguments as of ``step``.

        Raises:
            NoBatchError: on every rank, if one has neither batches nor a filler; or if a tensor
                stands for the list of micro-batches.
            LossContractError: if the loss did not return scalar sums.
        """
        batches = _listed(batches)
        spare = filler if filler is not None else (batches[-1] if batches else None)
        num_passes = self._agree_on_passes(len(batches), has_spare=spare is not None)
        with torch.no_grad():
            sums = self._accumulate(passes_over(batches, spare, num_passes), loss, scorers)
        total, weight, metrics = _unpack(sums, self.mesh.sum_over_data(sums.pack()))
        return Evaluation(loss=total / weight if weight else 0.0, weight=weight, metrics=metrics)

    def averaged(self) -> AbstractContextManager[object]:
        """Give the model its averages inside the block, if any are kept; every rank enters."""
        return nullcontext() if self.ema is None else self.ema.in_place()

    def _agree_on_passes(self, num_batches: int, *, has_spare: bool) -> int:
        lacking = torch.tensor([num_batches, int(not has_spare)], device=self.mesh.process.device)
        num_passes, some_rank_lacks = self.mesh.max_(lacking).tolist()
        if num_passes == 0 and some_rank_lacks and self.replica_group is None:
            return 0
        if some_rank_lacks:
            raise NoBatchError(
                "a rank has no batch in this step and no filler; pass an empty batch of weight 0 "
                "as filler, so that it can take part in the collectives of the others"
            )
        return max(num_passes, 1)

    def _accumulate(
        self,
        passes: Sequence[Pass[Batch]],
        loss: LossFunction[Batch],
        scorers: Sequence[Scorer[Batch]],
    ) -> _Sums:
        zero = torch.zeros((), dtype=torch.float64, device=self.mesh.process.device)
        sums = _Sums(zero, zero.clone(), {})

        def take(each: Pass[Batch], result: LossResult) -> None:
            _check_result(result, training=torch.is_grad_enabled())
            if each.counts:
                sums.add(result)
            else:
                for name in result.metrics:
                    sums.touch(name)

        with self._saved_activations():
            scale = self.mesh.gradient_scale
            run_passes(self.model, passes, loss, take, scorers=scorers, gradient_scale=scale)
        return sums

    def _saved_activations(self) -> AbstractContextManager[object]:
        if not self._config.offload_activations:
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=self.mesh.process.device_type == "cuda")

    def _reduce(self, sums: _Sums) -> tuple[float, float, dict[str, float], Tensor | None]:
        packed, squares = self.mesh.sum_over_data(sums.pack()), None
        if self.replica_group is not None:
            self.replica_group.sum_([packed])
        else:  # asked for before the host waits for the sums, so that it waits once
            squares = gradient_squares(self._parameters, self.mesh)
        return *_unpack(sums, packed), squares

    def _update(
        self, total: float, weight: float, lr: float, squares: Tensor | None
    ) -> tuple[Outcome, float]:
        if self.replica_group is not None:
            if weight:
                sum_over_replicas(self._parameters, self.replica_group)
            self.replica_group.commit()
        if weight == 0.0:
            return "no_weight", 0.0
        squares = gradient_squares(self._parameters, self.mesh) if squares is None else squares
        norm = math.sqrt(squares.item()) / abs(weight)
        if not (math.isfinite(norm) and math.isfinite(total)):
            return "non_finite", norm
        self.num_skipped_in_a_row = 0
        clip = min(1.0, self._config.max_grad_norm / (norm + 1e-6))
        finish_gradients(self._parameters, factor=clip / weight)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.num_updates)
        self.num_updates += 1
        return "updated", norm

    def _account_for(self, step: BadStep[Any], figures: str) -> str:
        """Count a step that was not finite, write its batches down, and say what was wrong.

        Raises:
            NonFiniteStepError: on every rank, if it was one too many in a row.
        """
        self.num_skipped_in_a_row += 1
        self.num_skipped += 1
        problem = step.explain(self._config.dump_directory, f"skipped-{self.num_skipped:04d}")
        in_a_row = self.num_skipped_in_a_row
        if in_a_row > self._config.max_non_finite_steps:
            raise NonFiniteStepError(
                f"{in_a_row} steps in a row were not finite (now: {figures}; {problem}); look at "
                "the batches, or lower the rate"
            )
        return problem


def _unpack(sums: _Sums, packed: Tensor) -> tuple[float, float, dict[str, float]]:
    total, weight, *values = packed.tolist()
    return total, weight, dict(zip(sorted(sums.metrics), values, strict=True))


def _check_shared(trained: Mapping[str, Tensor], mesh: TrainingMesh) -> None:
    """Refuse parameters whose gradients nobody would add up over ranks."""
    plain = [name for name, parameter in trained.items() if not isinstance(parameter, DTensor)]
    if mesh.data_size > 1 and plain:
        raise MeshError(
            f"{plain[0]} is not sharded ({len(plain)} of {len(trained)} parameters are not), so "
            f"each of the {mesh.data_size} ranks would train a model of its own; call "
            "shard_module(model, mesh, blocks=...) first"
        )


def _listed(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Return micro-batches as a list; a tensor or a dictionary would be one for each entry."""
    if isinstance(batches, Mapping):
        raise NoBatchError(
            "a dictionary stands for the list of micro-batches; for one of them pass [batch]"
        )
    if isinstance(batches, Tensor):
        raise NoBatchError(
            f"a tensor {tuple(batches.shape)} stands for the list of micro-batches; for one of "
            "them pass [batch]"
        )
    return list(batches)


def _check_result(result: LossResult, *, training: bool) -> None:
    names = ("total", "weight", "metrics")
    if lacking := [name for name in names if not hasattr(result, name)]:
        raise LossContractError(
            f"the loss returned a {type(result).__name__} without {', '.join(lacking)}; it must "
            "have total (the sum, with gradient), weight (what it is a sum of) and metrics (a "
            "dictionary of sums), such as a LossSum or an SftLoss has"
        )
    metrics = cast("object", result.metrics)
    if not isinstance(metrics, Mapping):
        raise LossContractError(f"the loss returned metrics that are a {type(metrics).__name__}")
    sums: dict[str, object] = {"total": result.total, "weight": result.weight}
    sums |= {f"metric {name!r}": value for name, value in result.metrics.items()}
    for name, value in sums.items():
        if not isinstance(value, Tensor) or value.dim() != 0:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value)
            raise LossContractError(f"the loss returned a {name} that is no scalar tensor: {found}")
    if training and not result.total.requires_grad:
        raise LossContractError(
            "the loss returned a total without gradient; with nothing to train on it must still be "
            "a masked sum over the model's outputs, or the ranks' collectives no longer match"
        )
