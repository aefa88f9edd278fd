"""The reference for scoring: one forward pass of a transformers model over given tokens.

Needs torch, which is why it is not imported with the package.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from transformers import PreTrainedModel

from cosmos_core.trajectory import TeacherScores
from cosmos_rollout.checking import check_request
from cosmos_rollout.engine import GenerationRequest, Sampling, Shown
from cosmos_rollout.errors import EngineClosedError, NoPicturesError


class ModelScorer:
    """A `TokenScorer` over a causal language model, one sample at a time, in a thread of its own.

    Args:
        model: in evaluation mode.
        context_length: most tokens of a sample.
    """

    def __init__(self, model: PreTrainedModel, *, context_length: int) -> None:
        self._model = model
        self._context_length = context_length
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._is_closed = False

    @property
    def context_length(self) -> int:
        """Most tokens of a sample."""
        return self._context_length

    async def score(
        self, token_ids: Sequence[int], top_k: int, shown: Shown | None = None
    ) -> TeacherScores:
        """Return the scores; see `TokenScorer.score`."""
        if shown is not None:
            raise NoPicturesError(
                f"{len(shown.images)} pictures or videos among tokens to score: transformers here "
                "is shown none; VLLMConfig is, with a model that sees"
            )
        if self._is_closed:
            raise EngineClosedError("the scorer was closed")
        tokens = tuple(int(token) for token in token_ids)
        check_request(
            GenerationRequest(request_id="score", prompt_token_ids=tokens, sampling=Sampling()),
            context_length=self._context_length + 1,
            vocabulary_size=int(self._model.config.vocab_size),
        )
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._score, tokens, top_k)

    async def aclose(self) -> None:
        """End after the pass in hand. Idempotent."""
        self._is_closed = True
        await asyncio.to_thread(self._thread.shutdown)

    @torch.no_grad()
    def _score(self, tokens: tuple[int, ...], top_k: int) -> TeacherScores:
        ids = torch.tensor([tokens], device=self._model.device)
        logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1]
        table = torch.log_softmax(logits.double(), dim=-1)  # [T - 1, V]
        own = table.gather(-1, ids[0, 1:, None])[:, 0]
        best = table.topk(top_k, dim=-1)
        zero = torch.zeros(1, top_k)
        return TeacherScores(
            logprobs=torch.cat([torch.zeros(1), own.float().cpu()]).numpy(),
            top_logprobs=torch.cat([zero, best.values.float().cpu()]).numpy(),
            top_token_ids=torch.cat([zero.int(), best.indices.int().cpu()])
            .numpy()
            .astype(np.int32),
        )
