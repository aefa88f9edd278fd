"""A reward model from pairs, by the Bradley-Terry likelihood: a language model's value head."""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from cosmos_algos import RewardModelConfig, TokenBatch
from cosmos_app.given.divided import Divided
from cosmos_app.given.preference_data import Pair
from cosmos_app.given.preferences import Layout, PairData, row_figures, row_sizes
from cosmos_parallel import Learner, LossResult, Scorer, StepReport


class RewardTask:
    """Better and worse answers to one prompt, of which the better gets more; see ``Task``."""

    def __init__(
        self,
        data: Divided[Pair],
        algorithm: RewardModelConfig,
        layout: Layout,
    ) -> None:
        """Keep the pairs in memory.

        Args:
            data: pairs to train on, and pairs kept back.
            algorithm: the likelihood.
            layout: how pairs become micro-batches.
        """
        self._pairs = PairData(data, layout)
        self._algorithm = algorithm
        self.data = data
        self.filler = self._pairs.filler
        self.scorers: tuple[Scorer[TokenBatch], ...] = ()

    def prepare(self, learner: Learner, step: int) -> None:
        """Need nothing."""

    def prepare_held_out(self, learner: Learner) -> None:
        """Need nothing."""

    def batches(self, step: int, *, rank: int, size: int) -> list[TokenBatch]:
        """Return share ``rank`` of ``size`` of a step."""
        return self._pairs.batches(step, rank=rank, size=size)

    def held_out(self, *, rank: int, size: int) -> dict[str, list[TokenBatch]]:
        """Return a share of the pairs kept back, by data set; empty if there are none."""
        return self._pairs.held_out(rank=rank, size=size)

    def loss(self, model: nn.Module, batch: TokenBatch) -> LossResult:
        """Reward the answers of a batch, and sum over its pairs."""
        moved = batch.to(next(model.parameters()).device)
        result = self._algorithm.loss(model, moved)
        return replace(result, metrics={**result.metrics, **row_sizes(moved)})

    def figures(self, report: StepReport) -> Mapping[str, float]:
        """Return how often and by how much the better answer is ahead."""
        means = {name: report.mean(name, over="pairs") for name in ("accuracy", "margin")}
        return {**means, **row_figures(report)}
