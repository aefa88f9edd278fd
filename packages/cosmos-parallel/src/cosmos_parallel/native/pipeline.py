"""Torchtitan's decoder, cut into pipeline stages."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.native.model import NativeCausalLM
from cosmos_parallel.native.names import HfNames
from cosmos_parallel.native.stage import Stage
from cosmos_parallel.passes import LossFunction, LossResult, Pass, Scores
from cosmos_parallel.pipeline import Call, Pipeline, called_alone


class PipelinedCausalLM(NativeCausalLM):
    """The stages of one pipeline rank; it cannot be called by itself."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        head: nn.Linear | None,
        mesh: TrainingMesh,
        *,
        config: Any,
        hf_names: HfNames,
        hidden_dtype: torch.dtype,
    ) -> None:
        """Join what this rank has.

        Args:
            stages: by their index along the whole pipeline.
            head: the output head, on the rank of the last stage.
            mesh: the ranks of the replica.
            config: the Hugging Face config.
            hf_names: what files call the tensors.
            hidden_dtype: what goes between stages.
        """
        super().__init__(
            config,
            list(stages.values()),
            head,
            multiple_of=mesh.config.cp * mesh.config.tp,
            hf_names=hf_names,
        )
        self._pipeline = Pipeline(
            stages,
            mesh,
            width=config.get_text_config().hidden_size,
            shares=self.multiple_of,
            hidden_dtype=hidden_dtype,
        )

    @property
    def least_passes(self) -> int:
        """How many passes fill the pipeline."""
        return self._pipeline.least_passes

    def run_passes(
        self,
        passes: Sequence[Pass[Any]],
        loss: LossFunction[Any],
        on_result: Callable[[Pass[Any], LossResult], None],
    ) -> None:
        """Run all passes through the pipeline; every rank of the replica calls.

        Raises:
            LossContractError: if the loss does not call the model.
        """
        self._pipeline.run_passes(self, passes, loss, on_result)

    def score_passes(
        self, passes: Sequence[Pass[Any]], score: Callable[[nn.Module, Any], Scores]
    ) -> list[Scores]:
        """Return the scores of all passes; see ``Pipeline.score_passes``."""
        return self._pipeline.score_passes(self, passes, score)

    def answering(self, answer: Callable[[Call], Tensor]) -> AbstractContextManager[None]:
        """Inside the block, take hidden states from ``answer``."""
        return self.running(lambda tokens, positions: answer(Call(tokens, positions)))

    def laid_out(self, calls: Sequence[Call], rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return tokens and positions of all calls, each padded to so many rows and columns."""
        tokens = [_padded(call.tokens, rows, columns, 0) for call in calls]
        positions = [
            _padded(call.positions, rows, columns, 1)
            for call in calls
            if call.positions is not None
        ]
        return torch.cat(tokens), torch.cat(positions)

    def _run_stages(self, tokens: Tensor, positions: Tensor) -> NoReturn:
        raise called_alone()


def _padded(values: Tensor, rows: int, columns: int, value: int) -> Tensor:
    missing = (0, columns - values.shape[1], 0, rows - values.shape[0])
    return nn.functional.pad(values, missing, value=value)
