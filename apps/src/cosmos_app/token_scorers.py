"""Frozen models that score batches of tokens, as a learner runs them beside the trained one."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from cosmos_algos import Algorithm, TokenBatch
from cosmos_parallel import Scorer, Scores

WithScores = Callable[[nn.Module, TokenBatch], TokenBatch]


def token_scorer(
    model: nn.Module, with_scores: WithScores, fields: Sequence[str]
) -> Scorer[TokenBatch]:
    """Return a scorer that fills optional fields of batches.

    Args:
        model: frozen; of the mesh of the trained one.
        with_scores: returns a batch with the scores of a model, which it calls once.
        fields: what it fills in.
    """

    def score(frozen: nn.Module, batch: TokenBatch) -> Scores:
        found = with_scores(frozen, batch.to(next(frozen.parameters()).device))
        return {name: getattr(found, name) for name in fields}

    def join(batch: TokenBatch, scores: Scores) -> TokenBatch:
        return replace(batch, **scores)

    return Scorer(model=model, score=score, join=join)


def scorers_of(
    algorithm: Algorithm, reference: nn.Module | None, teacher: nn.Module | None
) -> list[Scorer[TokenBatch]]:
    """Return what scores batches for an algorithm of reinforcement learning.

    Args:
        algorithm: how models are asked.
        reference: frozen; ``None`` if the algorithm needs none.
        teacher: frozen; ``None`` if the algorithm needs none, or samples come with its scores.
    """
    scorers: list[Scorer[TokenBatch]] = []
    if reference is not None:
        scorers.append(token_scorer(reference, algorithm.with_reference, ["reference_logprobs"]))
    if teacher is not None:
        fields = ["teacher_logprobs"]
        if algorithm.likeliest is not None:
            fields += ["teacher_top_logprobs", "teacher_top_token_ids"]
        scorers.append(token_scorer(teacher, algorithm.with_teacher, fields))
    return scorers
