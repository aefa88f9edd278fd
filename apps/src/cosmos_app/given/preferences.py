"""Preferences: pairs for DPO and IPO, marked samples for KTO, with a frozen reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from cosmos_algos import (
    DpoConfig,
    KtoBatch,
    KtoConfig,
    LabelledTokens,
    LossSum,
    SampleWeights,
    TokenBatch,
    collate_labelled,
    collate_pairs,
    empty_batch,
    kto_baseline,
    split_batches,
)
from cosmos_app.given.divided import Divided
from cosmos_app.given.preference_data import MarkedSample, Pair, mismatched
from cosmos_app.step_share import show_pictures
from cosmos_app.token_scorers import token_scorer
from cosmos_parallel import (
    Learner,
    LossResult,
    PictureReader,
    Scorer,
    Scores,
    SftBatchConfig,
    StepReport,
    balanced_parts,
)

_SCORES = ("reference_logprobs",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How samples become micro-batches.

    Attributes:
        batch: examples in a step, and tokens in a micro-batch.
        vocab_size: token ids have to be below it.
        pictures: what shows pictures to the model, where there are any.
        longest: tokens that a sample may have; 0 for any number.
    """

    batch: SftBatchConfig
    vocab_size: int
    pictures: PictureReader | None = None
    longest: int = 0

    def shown(self, batch: TokenBatch, samples: Sequence[LabelledTokens] = ()) -> TokenBatch:
        """Return a batch of samples, or one of nothing, with pictures; see ``show_pictures``."""
        if self.pictures is None:
            return batch
        images = [sample.images for sample in samples] or [()] * batch.token_ids.shape[0]
        return show_pictures(batch, images, self.pictures)


def _shares(lengths: Sequence[int], layout: Layout, rank: int, size: int) -> list[list[int]]:
    """Return the micro-batches of a share, as indices."""
    mine = balanced_parts(lengths, size)[rank]
    parts = split_batches([lengths[index] for index in mine], layout.batch.max_tokens)
    return [[mine[row] for row in rows] for rows in parts]


class PairData:
    """Pairs in memory, and the batches of a step or of what is kept back; see ``Task``."""

    def __init__(self, data: Divided[Pair], layout: Layout) -> None:
        """Keep pairs to train on, and pairs kept back."""
        self._data = data
        self._layout = layout
        self.filler = layout.shown(empty_batch(num_rows=2))

    def batches(self, step: int, *, rank: int, size: int) -> list[TokenBatch]:
        """Return share ``rank`` of ``size`` of a step."""
        batches = self._lay_out(self._data.of_step(self._layout.batch, step), rank, size)
        if self._layout.pictures is not None:
            coming = self._data.of_step(self._layout.batch, step + 1)
            rows = _shares(_lengths(coming), self._layout, rank, size)
            samples = (sample for part in rows for i in part for sample in coming[i])
            self._layout.pictures.show_next(image for each in samples for image in each.images)
        return batches

    def held_out(self, *, rank: int, size: int) -> dict[str, list[TokenBatch]]:
        """Return a share of the pairs kept back, by data set; empty if there are none."""
        kept = self._data.held_out
        return {name: self._lay_out(pairs, rank, size) for name, pairs in kept.items()}

    def _lay_out(self, pairs: Sequence[Pair], rank: int, size: int) -> list[TokenBatch]:
        return [
            self._collate([pairs[i] for i in rows])
            for rows in _shares(_lengths(pairs), self._layout, rank, size)
        ]

    def _collate(self, pairs: Sequence[Pair]) -> TokenBatch:
        batch = collate_pairs(pairs, vocab_size=self._layout.vocab_size)
        return self._layout.shown(batch, [one for pair in pairs for one in pair])


def _lengths(pairs: Sequence[Pair]) -> list[int]:
    """Return how many tokens each pair takes, padded to its longer sample."""
    return [2 * max(len(sample.token_ids) for sample in pair) for pair in pairs]


class PairTask:
    """Better and worse answers to one prompt, by DPO or IPO; see ``Task``."""

    def __init__(
        self,
        data: Divided[Pair],
        reference: nn.Module,
        algorithm: DpoConfig,
        layout: Layout,
    ) -> None:
        """Keep the pairs in memory.

        Args:
            data: pairs to train on, and pairs kept back.
            reference: frozen; of the same mesh as the policy.
            algorithm: DPO, or its bounded relative.
            layout: how pairs become micro-batches.
        """
        self._pairs = PairData(data, layout)
        self._algorithm = algorithm
        self.data = data
        self.filler = self._pairs.filler
        self.scorers = (token_scorer(reference, algorithm.with_reference, _SCORES),)

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
        """Score a batch that has the reference's scores by the policy, and sum over its pairs."""
        moved = batch.to(next(model.parameters()).device)
        result = self._algorithm.loss(model, moved)
        return replace(result, metrics={**result.metrics, **row_sizes(moved)})

    def figures(self, report: StepReport) -> Mapping[str, float]:
        """Return how often and by how much the better answer is ahead."""
        means = {
            name: report.mean(name, over="pairs")
            for name in ("accuracy", "margin", "chosen", "rejected")
        }
        return {**means, **row_figures(report)}


class KtoTask:
    """Answers that are good or bad, by KTO; see ``Task``."""

    def __init__(
        self,
        data: Divided[MarkedSample],
        reference: nn.Module,
        algorithm: KtoConfig,
        layout: Layout,
    ) -> None:
        """Keep the samples in memory; arguments as of ``PairTask``."""
        self.data = data
        self._reference = token_scorer(reference, algorithm.with_reference, _SCORES)
        self.scorers = (_of_marked(self._reference),)
        self._algorithm = algorithm
        self._layout = layout
        self._baseline = torch.zeros(())
        self._empty = layout.shown(empty_batch())
        self.filler = KtoBatch(
            tokens=self._empty,
            desirable=torch.ones(1, dtype=torch.bool),
            baseline=torch.zeros(()),
        )

    def prepare(self, learner: Learner, step: int) -> None:
        """Estimate the divergence over the whole step, on every replica by itself."""
        self._baseline = self._divergence(learner, self.data.of_step(self._layout.batch, step))

    def prepare_held_out(self, learner: Learner) -> None:
        """Estimate the divergence over the samples kept back, of all data sets together."""
        if self.data.held_out:
            kept = [sample for samples in self.data.held_out.values() for sample in samples]
            self._baseline = self._divergence(learner, kept)

    def _divergence(self, learner: Learner, samples: Sequence[MarkedSample]) -> Tensor:
        """Return z over samples; 0 where all have one prompt."""
        mesh, others = learner.mesh, mismatched(samples, self._layout.longest)
        lengths = [len(sample.token_ids) for sample in others]
        batches = [
            self._collate([others[i] for i in rows])
            for rows in _shares(lengths, self._layout, mesh.data_rank, mesh.data_size)
        ]
        found = learner.evaluate(
            batches, self._ratio_sums, filler=self._empty, scorers=[self._reference]
        )
        return kto_baseline(torch.tensor(found.loss * found.weight), torch.tensor(found.weight))

    def batches(self, step: int, *, rank: int, size: int) -> list[KtoBatch]:
        """Return share ``rank`` of ``size`` of a step."""
        batches = self._lay_out(self.data.of_step(self._layout.batch, step), rank, size)
        if self._layout.pictures is not None:
            coming = self.data.of_step(self._layout.batch, step + 1)
            rows = _shares(_sizes(coming), self._layout, rank, size)
            samples = (coming[i].tokens for part in rows for i in part)
            self._layout.pictures.show_next(image for each in samples for image in each.images)
        return batches

    def held_out(self, *, rank: int, size: int) -> dict[str, list[KtoBatch]]:
        """Return a share of the samples kept back, by data set.

        They are judged by the divergence last estimated.
        """
        kept = self.data.held_out
        return {name: self._lay_out(samples, rank, size) for name, samples in kept.items()}

    def loss(self, model: nn.Module, batch: KtoBatch) -> LossResult:
        """Score a batch that has the reference's scores by the policy, and sum over its samples."""
        moved = batch.to(next(model.parameters()).device)
        result = self._algorithm.loss(model, moved)
        return replace(result, metrics={**result.metrics, **row_sizes(moved.tokens)})

    def figures(self, report: StepReport) -> Mapping[str, float]:
        """Return the mean log-ratio and the estimate that it is held against."""
        return {
            "log_ratio": report.mean("log_ratio", over="samples"),
            "divergence": float(self._baseline),
            **row_figures(report),
        }

    def _ratio_sums(self, model: nn.Module, batch: TokenBatch) -> LossSum:
        moved = batch.to(next(model.parameters()).device)
        ratios = self._algorithm.log_ratios(model, moved)
        return LossSum(
            total=(ratios * moved.denominators).sum(), weight=moved.denominators.sum(), metrics={}
        )

    def _collate(self, samples: Sequence[LabelledTokens]) -> TokenBatch:
        ones = torch.ones(len(samples), dtype=torch.float64)
        batch = collate_labelled(
            samples, SampleWeights(ones, ones), vocab_size=self._layout.vocab_size
        )
        return self._layout.shown(batch, samples)

    def _lay_out(self, samples: Sequence[MarkedSample], rank: int, size: int) -> list[KtoBatch]:
        return [
            KtoBatch(
                tokens=self._collate([samples[i].tokens for i in rows]),
                desirable=torch.tensor([samples[i].desirable for i in rows]),
                baseline=self._baseline,
            )
            for rows in _shares(_sizes(samples), self._layout, rank, size)
        ]


def _sizes(samples: Sequence[MarkedSample]) -> list[int]:
    return [len(sample.tokens.token_ids) for sample in samples]


def _of_marked(scorer: Scorer[TokenBatch]) -> Scorer[KtoBatch]:
    """Return a scorer of the samples of marked batches."""

    def score(frozen: nn.Module, batch: KtoBatch) -> Scores:
        return scorer.score(frozen, batch.tokens)

    def join(batch: KtoBatch, scores: Scores) -> KtoBatch:
        return replace(batch, tokens=scorer.join(batch.tokens, scores))

    return Scorer(model=scorer.model, score=score, join=join)


def row_sizes(batch: TokenBatch) -> dict[str, Tensor]:
    """Return ``num_tokens`` of a batch, and ``num_places`` with padding."""
    return {
        "num_tokens": batch.valid.sum().double(),
        "num_places": torch.tensor(float(batch.token_ids.numel()), device=batch.valid.device),
    }


def row_figures(report: StepReport) -> dict[str, float]:
    """Return how many tokens a step had, and how fast it was."""
    return {
        "tokens": report.metrics["num_tokens"],
        "useful_tokens": report.mean("num_tokens", over="num_places"),
        "tokens_per_second": report.per_second("num_tokens"),
    }
