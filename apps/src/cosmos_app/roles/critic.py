"""Steps whose advantages take a pass over all samples, for a critic or to whiten a penalty.

batches ─value─► moments over ranks and replicas ─► whitened batches ─► update ─► update ...

Under a pipeline values are where the last stage is, and so are losses: what is summed of them comes
to all ranks, and batches of the others have zeros for them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from cosmos_algos import (
    Algorithm,
    LossSum,
    Moments,
    TokenBatch,
    advantage_moments,
    with_whitened_advantages,
)
from cosmos_parallel import Learner, LossResult, Scorer, StepReport

_OF_THE_LAST = ("clipped", "critic/clipped")


def critic_step(
    learner: Learner,
    batches: Sequence[TokenBatch],
    algorithm: Algorithm,
    *,
    value: Callable[[nn.Module, TokenBatch], TokenBatch],
    loss: Callable[[nn.Module, TokenBatch], LossResult],
    scorers: Sequence[Scorer[TokenBatch]] = (),
) -> StepReport:
    """Take the updates of one step; all ranks of all replicas call together.

    Args:
        learner: of the model; with a critic it has a value head.
        batches: this rank's, at least one.
        algorithm: one that scores first.
        value: returns a batch with the advantages of its tokens, and values if there is a critic.
        loss: of such a batch.
        scorers: frozen models, of which the batches that ``value`` sees have scores.

    Returns:
        What the first update says, with the time of all, and with what the last one clipped.

    Raises:
        ReplicaLostError: if a replica did not take part to the end; the updates before are made.
    """
    assert algorithm.scores_first
    valued, seconds = _valued(learner, batches, value, scorers, whitens=algorithm.whitens), 0.0
    reports: list[StepReport] = []
    for _ in range(algorithm.epochs):
        reports.append(learner.step(valued, loss))
        seconds += reports[-1].seconds
    first, last = reports[0], reports[-1]
    clipped = {name: last.metrics[name] for name in _OF_THE_LAST if name in last.metrics}
    return replace(
        last,
        loss=first.loss,
        metrics={**first.metrics, **clipped},
        seconds=seconds,
        problem="; ".join(report.problem for report in reports if report.problem),
    )


def critic_figures(means: Mapping[str, float]) -> dict[str, float]:
    """Return which share of the variance of returns the critic explains.

    Args:
        means: metrics of a step, per trained token.
    """
    if "critic/return" not in means:
        return {}
    variance = means["critic/return_squared"] - means["critic/return"] ** 2
    if variance <= 0.0:
        return {}
    return {"critic/explained": 1.0 - means["critic/squared_error"] / variance}


def _unvalued(batch: TokenBatch) -> TokenBatch:
    """Return a batch of a rank without the last stage, where losses only name their tokens."""
    zeros = batch.advantages.new_zeros(()).expand(batch.advantages.shape)
    scores = dict.fromkeys(("old_logprobs", "reference_logprobs", "values", "returns"), zeros)
    return replace(batch, advantages=zeros, **scores)


def _valued(
    learner: Learner,
    batches: Sequence[TokenBatch],
    value: Callable[[nn.Module, TokenBatch], TokenBatch],
    scorers: Sequence[Scorer[TokenBatch]],
    *,
    whitens: bool,
) -> list[TokenBatch]:
    """Return this rank's batches with advantages, whitened over all samples of the step."""
    found: list[TokenBatch] = []

    def measure(model: nn.Module, batch: TokenBatch) -> LossSum:
        found.append(value(model, batch))
        moments = advantage_moments(found[-1])
        return LossSum(
            total=moments.total, weight=moments.count, metrics={"squares": moments.squares}
        )

    sums = learner.evaluate(batches, measure, scorers=scorers)
    # what fills in for other ranks' batches is done with
    mine = found[: len(batches)] if found else [_unvalued(batch) for batch in batches]
    if not whitens:
        return mine
    device = learner.mesh.process.device
    packed = torch.tensor(
        [sums.weight, sums.loss * sums.weight, sums.metrics["squares"]],
        dtype=torch.float64,
        device=device,
    )
    if learner.replica_group is not None:
        learner.replica_group.sum_([packed])
        # a rank that lacks the sum would be waited for by its replica's others in their next pass
        learner.replica_group.commit()
    moments = Moments(*packed)
    return [with_whitened_advantages(batch, moments) for batch in mine]
