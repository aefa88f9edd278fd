"""Pipeline parallelism: all micro-batches of a step through stages on several ranks at once.

A loss sees a whole model: it is called once to find out what it asks the model for, and again, on
the rank of the last stage, when the hidden states are there. So is what scores by a frozen model.

    rank 0   tokens ─► layers 0-1 ─┐   every rank calls loss(model, batch) and stops where it
    rank 1          ┌──────────────┘   calls the model: the tokens are known
                    └► layers 2-3 ─► hidden ─► loss(model, batch) again, model returns hidden
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from cosmos_parallel.errors import LossContractError, MeshError
from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.passes import LossFunction, LossResult, Pass, Scores
from cosmos_parallel.sharding import reshard

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Call:
    """What a loss calls a model with.

    Attributes:
        tokens: int64[B, T].
        positions: ``[B, T]``, or with an axis before them; ``None`` for one sample in a row.
        others: pictures and the like.
    """

    tokens: Tensor
    positions: Tensor | None
    others: Mapping[str, Any] = field(default_factory=dict[str, Any])


class StageModule(Protocol):
    """Consecutive layers of a model, a module.

    Attributes:
        is_first: whether it takes tokens.
        is_last: whether it gives what the head takes.
    """

    is_first: bool
    is_last: bool

    def __call__(self, entering: Tensor, beside: Tensor) -> Tensor:
        """Run tokens, or what the stage before returned, through the layers."""
        ...


class CutModel(Protocol):
    """A model whose stages a `Pipeline` runs; it is what losses are called with, and a module."""

    def answering(self, answer: Callable[[Call], Tensor]) -> AbstractContextManager[None]:
        """Inside the block, take hidden states [B, T, dim] of a call from ``answer``."""
        ...

    def laid_out(self, calls: Sequence[Call], rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return tokens [N rows, columns] of N calls, and what every stage is given beside.

        The latter is cut into N equal parts along its first dim, one for each call.
        """
        ...


class Joined(nn.Module):
    """Named children without a forward pass of their own: what a rank has of several stages."""


class _AskedError(Exception):
    """Carries what a loss called the model with out of the loss."""

    def __init__(self, call: Call) -> None:
        super().__init__("the model was called")
        self.call = call


@dataclass(frozen=True, slots=True)
class _Result:
    total: Tensor
    weight: Tensor
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Shape:
    num_passes: int
    rows: int
    columns: int


class _AccumulatingStage(PipelineStage):
    """A stage whose gradients are added to those of a schedule before."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Give up gathered parameters only; torch drops gradients too, as of a run for shapes."""
        reshard(self.submod)


class Pipeline:
    """The stages of one pipeline rank."""

    def __init__(
        self,
        stages: Mapping[int, StageModule],
        mesh: TrainingMesh,
        *,
        width: int,
        shares: int,
        hidden_dtype: torch.dtype,
    ) -> None:
        """Take what this rank has.

        Args:
            stages: by their index along the whole pipeline, in the order of the layers.
            mesh: the ranks of the replica.
            width: of hidden states.
            shares: ranks that have a stretch of each sequence between stages.
            hidden_dtype: what goes between stages.
        """
        self._stages = tuple(stages.values())
        self._indices = tuple(stages)
        self._mesh = mesh
        self._width = width
        self._shares = shares
        self._hidden_dtype = hidden_dtype
        assert mesh.dims is not None
        self._group: dist.ProcessGroup = mesh.dims.get_mesh("pp").get_group()

    @property
    def least_passes(self) -> int:
        """How many passes fill the pipeline."""
        return self._mesh.config.num_stages

    def run_passes(
        self,
        model: CutModel,
        passes: Sequence[Pass[Any]],
        loss: LossFunction[Any],
        on_result: Callable[[Pass[Any], LossResult], None],
    ) -> None:
        """Run all passes through the pipeline; every rank of the replica calls.

        Raises:
            LossContractError: if the loss does not call the model.
        """
        calls = [_asked(model, loss, each.batch) for each in passes]
        if not calls:
            return
        results: dict[int, LossResult] = {}

        def take(number: int, hidden: Tensor) -> Tensor:
            index = min(number, len(passes) - 1)
            results[index] = result = _answered(model, loss, passes[index].batch, hidden)
            counts = passes[index].counts and number < len(passes)
            return result.total * (self._mesh.gradient_scale if counts else 0.0)

        if torch.is_grad_enabled():
            self._train(model, calls, take)
        else:
            self._look_ahead(model, calls, take)
        for each, result in zip(passes, self._shared(results, len(passes)), strict=True):
            on_result(each, result)

    def score_passes(
        self,
        model: CutModel,
        passes: Sequence[Pass[Any]],
        score: Callable[[nn.Module, Any], Scores],
    ) -> list[Scores]:
        """Return the scores of all passes, without gradients; every rank of the replica calls.

        Ranks without the last stage get zeros of the same shapes, which take no memory. What FSDP2
        has gathered of the stages is given up: other models run next.

        Raises:
            LossContractError: if ``score`` does not call the model.
        """
        calls = [_asked(model, score, each.batch) for each in passes]
        if not calls:
            return []
        found: dict[int, Scores] = {}

        def take(number: int, hidden: Tensor) -> None:
            found[number] = _answered(model, score, passes[number].batch, hidden)

        with torch.no_grad():
            self._look_ahead(model, calls, take)
        reshard(_module(model))
        return self._outlined([found[number] for number in sorted(found)])

    def _train(
        self, model: CutModel, calls: Sequence[Call], take: Callable[[int, Tensor], Tensor]
    ) -> None:
        """Run forward and backward passes, and some more to fill the rounds of a schedule."""
        shape = self._shape_of(calls)
        # schedules take no fewer passes than stages, and whole rounds
        calls = [*calls, *[calls[-1]] * (shape.num_passes - len(calls))]
        tokens, beside = model.laid_out(calls, shape.rows, shape.columns)
        self._schedule(shape, lambda hidden, number: take(int(number), hidden)).step(
            *([tokens] if self._stages[0].is_first else []),
            beside=beside,
            target=torch.arange(shape.num_passes) if self._stages[-1].is_last else None,
            return_outputs=False,
        )

    def _look_ahead(
        self, model: CutModel, calls: Sequence[Call], take: Callable[[int, Tensor], object]
    ) -> None:
        """Run forward passes only, which the schedules of torch cannot all do."""
        final = self._mesh.config.num_stages - 1
        for number, call in enumerate(calls):
            tokens, beside = model.laid_out([call], *call.tokens.shape)
            hidden = tokens
            for index, stage in zip(self._indices, self._stages, strict=True):
                before, after = self._owner(index - 1), self._owner(index + 1)
                if not stage.is_first and before != self._group.rank():
                    between = self._between(*tokens.shape)
                    hidden = torch.empty_like(between, device=tokens.device)
                    dist.recv(hidden, group=self._group, group_src=before)
                hidden = stage(hidden, beside)
                if index == final:
                    take(number, hidden)
                elif after != self._group.rank():
                    dist.send(hidden.contiguous(), group=self._group, group_dst=after)

    def _owner(self, index: int) -> int:
        """Return which rank of the pipeline has a stage."""
        num_ranks, round_, place = self._group.size(), *divmod(index, self._group.size())
        is_back = round_ == 1 and self._mesh.config.pp_schedule == "ZBVZeroBubble"
        return num_ranks - 1 - place if is_back else place

    def _shape_of(self, calls: Sequence[Call]) -> _Shape:
        degrees = self._mesh.config
        wanted = max(len(calls), degrees.num_stages)
        return _Shape(
            num_passes=-(-wanted // degrees.pp) * degrees.pp,
            rows=max(call.tokens.shape[0] for call in calls),
            columns=max(call.tokens.shape[1] for call in calls),
        )

    def _schedule(self, shape: _Shape, score: Callable[[Tensor, Tensor], Tensor]) -> Any:
        kind: Any = get_schedule_class(self._mesh.config.pp_schedule)  # of one stage, or of several
        stages = [self._pipeline_stage(index, shape) for index in self._indices]
        is_multi = issubclass(kind, PipelineScheduleMulti)
        return kind(
            stages if is_multi else stages[0],
            n_microbatches=shape.num_passes,
            loss_fn=score,
            scale_grads=False,
        )

    def _pipeline_stage(self, index: int, shape: _Shape) -> PipelineStage:
        stage = self._stages[self._indices.index(index)]
        between = self._between(shape.rows, shape.columns)
        tokens = torch.empty(shape.rows, shape.columns, dtype=torch.int64, device="meta")
        assert isinstance(stage, nn.Module)
        return _AccumulatingStage(
            stage,
            index,
            self._mesh.config.num_stages,
            self._mesh.process.device,
            input_args=tokens if stage.is_first else between,
            output_args=between.repeat(1, self._shares, 1) if stage.is_last else between,
            group=self._group,
        )

    def _between(self, rows: int, columns: int) -> Tensor:
        """Return what goes from stage to stage, without memory."""
        return torch.empty(
            rows,
            columns // self._shares,
            self._width,
            dtype=self._hidden_dtype,
            device="meta",
            requires_grad=True,  # or no gradient is expected
        )

    def _shared(self, results: Mapping[int, LossResult], num_passes: int) -> list[LossResult]:
        """Return the results of the last stage, on every rank of the pipeline."""
        is_last = self._stages[-1].is_last
        device = self._mesh.process.device
        source = rank_of_last_stage(self._mesh)
        names: list[Any] = [sorted(results[0].metrics) if is_last else None]
        dist.broadcast_object_list(names, group=self._group, group_src=source, device=device)
        table = torch.empty(num_passes, 2 + len(names[0]), dtype=torch.float64, device=device)
        if is_last:
            for index in range(num_passes):
                found = results[index]
                values = [found.total, found.weight, *(found.metrics[name] for name in names[0])]
                table[index] = torch.stack([value.detach().double() for value in values])
        dist.broadcast(table, group=self._group, group_src=source)
        return [
            _Result(
                row[0].clone().requires_grad_(torch.is_grad_enabled()),
                row[1],
                dict(zip(names[0], row[2:], strict=True)),
            )
            for row in table
        ]

    def _outlined(self, found: list[Scores]) -> list[Scores]:
        """Return the scores of the last stage, and zeros in their place on other ranks."""
        is_last, device = self._stages[-1].is_last, self._mesh.process.device
        outlines: list[Any] = [
            [{name: (tuple(value.shape), value.dtype) for name, value in s.items()} for s in found]
        ]
        source = rank_of_last_stage(self._mesh)
        dist.broadcast_object_list(outlines, group=self._group, group_src=source, device=device)
        if is_last:
            return found
        return [
            {
                name: torch.zeros((), dtype=dtype, device=device).expand(shape)
                for name, (shape, dtype) in outline.items()
            }
            for outline in outlines[0]
        ]


def divide_layers(num_layers: int, num_stages: int) -> list[range]:
    """Return the layers of each stage: as even as can be, early stages the longer ones."""
    short, longer = divmod(num_layers, num_stages)
    starts = [stage * short + min(stage, longer) for stage in range(num_stages + 1)]
    return [range(starts[stage], starts[stage + 1]) for stage in range(num_stages)]


def stages_of_rank(rank: int, num_ranks: int, *, num_stages: int, returning: bool) -> list[int]:
    """Return which stages a pipeline rank has.

    Args:
        rank: position along the pipeline.
        num_ranks: pipeline ranks.
        num_stages: one or two times ``num_ranks``.
        returning: true where the second round goes back over the ranks (ZBV), so that the first
            rank has the last stage; false where it starts at the first again.
    """
    if num_stages == num_ranks:
        return [rank]
    return [rank, num_stages - 1 - rank if returning else num_ranks + rank]


def called_alone() -> MeshError:
    """Say that stages do not run one batch."""
    return MeshError(
        "a model cut into pipeline stages runs only inside Learner.step and evaluate, which "
        "give it all micro-batches at once; a loss may call it once per batch"
    )


def rank_of_last_stage(mesh: TrainingMesh) -> int:
    """Return which rank along the pipeline has the last stage."""
    degrees = mesh.config
    return 0 if degrees.pp_schedule == "ZBVZeroBubble" else degrees.pp - 1


def _asked(model: CutModel, function: Callable[[nn.Module, Any], object], batch: Any) -> Call:
    def ask(call: Call) -> NoReturn:
        raise _AskedError(call)

    with model.answering(ask):
        try:
            function(_module(model), batch)
        except _AskedError as asked:
            return asked.call
    raise LossContractError("the loss did not call the model, so there is nothing to train on")


def _answered(
    model: CutModel, function: Callable[[nn.Module, Any], Answer], batch: Any, hidden: Tensor
) -> Answer:
    def give(call: Call) -> Tensor:
        return hidden[: call.tokens.shape[0], : call.tokens.shape[1]]

    with model.answering(give):
        return function(_module(model), batch)


def _module(model: CutModel) -> nn.Module:
    assert isinstance(model, nn.Module)
    return model
