"""Supervised fine-tuning: examples, and the likelihood of their answers."""

from collections.abc import Mapping

from torch import nn

from cosmos_app.given.divided import Divided
from cosmos_parallel import (
    Learner,
    LossResult,
    PictureReader,
    Scorer,
    SftBatch,
    SftBatchConfig,
    SftData,
    SftExample,
    StepReport,
    empty_batch,
    lay_out,
    sft_loss,
    step_batches,
)


class SftTask:
    """The likelihood of given answers; see ``Task``."""

    def __init__(
        self,
        data: Divided[SftExample],
        config: SftBatchConfig,
        reader: PictureReader | None = None,
        *,
        num_left_out: int = 0,
    ) -> None:
        """Keep the examples in memory.

        Args:
            data: to train on, and kept back.
            config: how they become batches.
            reader: of the model; used if any example has a picture.
            num_left_out: how many more there were to train on, but for their length.
        """
        has_any = any(example.images for example in data.rows())
        self.data = data
        self._train = SftData(
            examples=tuple(data.train), reader=reader if has_any else None, mixture=data.mixture
        )
        self._config = config
        self.num_left_out = num_left_out
        self.filler = empty_batch(self._train.reader)
        self.scorers: tuple[Scorer[SftBatch], ...] = ()

    def prepare(self, learner: Learner, step: int) -> None:
        """Need nothing."""

    def prepare_held_out(self, learner: Learner) -> None:
        """Need nothing."""

    def batches(self, step: int, *, rank: int, size: int) -> list[SftBatch]:
        """Return share ``rank`` of ``size`` of a step."""
        return step_batches(self._train, self._config, step, rank=rank, size=size)

    def held_out(self, *, rank: int, size: int) -> dict[str, list[SftBatch]]:
        """Return a share of the examples kept back, by data set; empty if there are none."""
        reader = self._train.reader
        return {
            name: lay_out(examples, self._config, rank=rank, size=size, reader=reader)
            for name, examples in self.data.held_out.items()
        }

    def loss(self, model: nn.Module, batch: SftBatch) -> LossResult:
        """Return the summed cross-entropy of a batch."""
        return sft_loss(model, batch)

    def figures(self, report: StepReport) -> Mapping[str, float]:
        """Return tokens, speed and accuracy, and how many examples are too long."""
        accuracy = report.mean("num_correct")
        return {**token_figures(report), "accuracy": accuracy, "left_out": self.num_left_out}


def token_figures(report: StepReport) -> dict[str, float]:
    """Return how many tokens a step had, and how fast it was."""
    return {
        "trained_tokens": report.weight,
        "tokens": report.metrics["num_tokens"],
        "useful_tokens": report.mean("num_tokens", over="num_places"),
        "tokens_per_second": report.per_second("num_tokens"),
    }
