"""Learning from a teacher's distributions: generalised Jensen-Shannon divergence, whole or top-k.

On-policy distillation by reverse KL needs no distribution, only the teacher's log-probability of
what was sampled; it is ``ObjectiveConfig.teacher_coefficient``.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from cosmos_algos.arguments import check_fractions, check_same_shape, check_whole
from cosmos_algos.errors import AlgorithmConfigError, ShapeError
from cosmos_algos.logprobs import check_chunk, check_temperature
from cosmos_algos.output_head import OutputHead, accurate, output_head


class TopK(NamedTuple):
    """The K likeliest tokens of a distribution, most likely first."""

    logprobs: Float[Tensor, "*S K"]
    token_ids: Int[Tensor, "*S K"]


def top_k(logits: Float[Tensor, "*S V"], k: int, *, temperature: float = 1.0) -> TopK:
    """Return the K likeliest tokens of softmax(logits / temperature) with their log-probs.

    These are float32 or better, whatever the logits are: the tail of rounded ones is no tail.

    Raises:
        AlgorithmConfigError: if there are not as many tokens, or ``temperature`` is not above 0.
    """
    check_temperature(temperature)
    if not 0 < k <= logits.shape[-1]:
        raise AlgorithmConfigError(f"top_k {k}: the distribution has {logits.shape[-1]} tokens")
    logprobs = torch.log_softmax(accurate(logits) / temperature, dim=-1)
    return TopK(*logprobs.topk(k, dim=-1))


def with_tail(logprobs: Float[Tensor, "*S K"]) -> Float[Tensor, "*S K1"]:
    """Append the log-probability of all other tokens together: log(1 - Σ exp).

    Without it K numbers are no distribution, and their divergence may be negative.
    """
    mass = logprobs.logsumexp(-1, keepdim=True)
    limit = math.log1p(-torch.finfo(logprobs.dtype).eps)
    tail = torch.log(-torch.expm1(mass.clamp(max=limit)))
    return torch.cat([logprobs, tail], dim=-1)


def generalised_jsd(
    teacher: Float[Tensor, "*S K"], student: Float[Tensor, "*S K"], beta: float
) -> Float[Tensor, "*S"]:
    """Return β KL(P‖M) + (1 - β) KL(Q‖M), M = βP + (1 - β)Q; P the teacher, Q the student.

    GKD (arXiv 2306.13649, eq. 1). The ends, where that is 0, are what it tends to when divided by
    β and by 1 - β: β = 0 is KL(P‖Q), forward, and β = 1 is KL(Q‖P), reverse.

    Args:
        teacher: log P, summing to 1 over the last dimension.
        student: log Q, with gradient.
        beta: where between the two.

    Raises:
        AlgorithmConfigError: if β is not in [0, 1].
        ShapeError: if the two have different shapes.
    """
    check_same_shape("jsd", {"teacher": teacher, "student": student})
    check_fractions("jsd", {"beta": beta})
    if beta == 0.0:
        return _kl(teacher, student)
    if beta == 1.0:
        return _kl(student, teacher)
    # what neither can say has no part in it, and no gradient (that of log 0 is none)
    known = (teacher > -torch.inf) | (student > -torch.inf)
    mixed = torch.logaddexp(
        teacher.where(known, 0.0) + math.log(beta), student.where(known, 0.0) + math.log1p(-beta)
    )
    return beta * _kl(teacher, mixed) + (1.0 - beta) * _kl(student, mixed)


def top_k_jsd(
    teacher: Float[Tensor, "*S K"], student: Float[Tensor, "*S K"], beta: float
) -> Float[Tensor, "*S"]:
    """Return ``generalised_jsd`` of the teacher's K likeliest tokens and one tail of all others.

    Never more than the divergence of the whole distributions, and equal to it for K = V - 1. What
    the student cannot say is one of the others: a token for which its vocabulary has no row.

    Args:
        teacher: log-probabilities of those tokens under the teacher.
        student: log-probabilities of the *same* tokens under the student, of ``known_logprobs``.
        beta: where between forward (0) and reverse (1).
    """
    kept = teacher.masked_fill(student == -torch.inf, -torch.inf)
    return generalised_jsd(with_tail(kept), with_tail(student), beta)


def distillation_losses(
    teacher: Float[Tensor, "*S V2"] | TopK,
    student: Float[Tensor, "*S V"],
    beta: float,
    *,
    temperature: float = 1.0,
) -> Float[Tensor, "*S"]:
    """Return the divergence of softmax(student / τ) from a teacher's distribution.

    That of Hinton et al. (arXiv 1503.02531) with GKD's divergence (arXiv 2306.13649, eq. 1):
    ``top_k_jsd`` from the likeliest tokens, and from logits ``generalised_jsd`` over the tokens
    that both vocabularies have.

    Args:
        teacher: logits, or the likeliest tokens at the same temperature, of ``top_k``.
        student: logits, with gradient.
        beta: where between forward (0) and reverse (1).
        temperature: τ; logits are divided by it.

    Raises:
        AlgorithmConfigError: if β is not in [0, 1], or ``temperature`` not above 0.
    """
    check_temperature(temperature)

    def logprobs(logits: Float[Tensor, "*S V"]) -> Float[Tensor, "*S V"]:
        return torch.log_softmax(accurate(logits) / temperature, dim=-1)

    if isinstance(teacher, TopK):
        mine = known_logprobs(logprobs(student), teacher.token_ids)
        return top_k_jsd(teacher.logprobs, mine, beta)
    shared = min(teacher.shape[-1], student.shape[-1])
    theirs, mine = (logprobs(logits[..., :shared]) for logits in (teacher, student))
    return generalised_jsd(theirs, mine, beta)


def likelihood_losses(
    student: Float[Tensor, "N V"], targets: Int[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Return -log π(y_t) of each given token, from a student's logits; float32 or better."""
    return cross_entropy(accurate(student), targets, reduction="none")


def known_logprobs(
    logprobs: Float[Tensor, "*S V"], token_ids: Int[Tensor, "*S K"]
) -> Float[Tensor, "*S K"]:
    """Return the log-probabilities of K tokens; -inf of those that are beyond the vocabulary.

    Teachers of the same tokenizer may have more rows of padding than the student.
    """
    is_known = token_ids < logprobs.shape[-1]
    found = logprobs.gather(-1, token_ids.where(is_known, 0))
    return found.where(is_known, -torch.inf)


def candidate_logprobs(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"] | OutputHead,
    token_ids: Int[Tensor, "N K"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    temperature: float = 1.0,
    chunk: int = 256,
) -> Float[Tensor, "N K"]:
    """Return log-probabilities of K tokens for each hidden state, chunk by chunk.

    Memory is ``chunk * V``, and ``weight`` may be a whole head, as of ``chunked_logprobs``: each
    chunk's logits are made again in backward. A token beyond the vocabulary has -inf, and no
    gradient.

    Raises:
        AlgorithmConfigError: if ``chunk`` is below 1, or ``temperature`` not above 0.
        ShapeError: if there is not one row of tokens for each hidden state.
    """
    check_chunk(chunk)
    check_temperature(temperature)
    if hidden.dim() != 2 or token_ids.dim() != 2 or len(hidden) != len(token_ids):
        raise ShapeError(
            f"candidates: hidden states {tuple(hidden.shape)} and token ids "
            f"{tuple(token_ids.shape)}; they must be [N, H] and [N, K]"
        )
    check_whole("candidates: token_ids", token_ids)
    head = output_head(weight, bias)

    def score(rows: Tensor, wanted: Tensor) -> Tensor:
        logprobs = torch.log_softmax(head.logits(rows) / temperature, dim=-1)
        return known_logprobs(logprobs, wanted)

    parts = [
        checkpoint(score, hidden[i : i + chunk], token_ids[i : i + chunk], use_reentrant=False)
        for i in range(0, max(hidden.shape[0], 1), chunk)
    ]
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def _kl(one: Float[Tensor, "*S K"], other: Float[Tensor, "*S K"]) -> Float[Tensor, "*S"]:
    """Return Σ p (log p - log q); 0 log 0 is 0."""
    kept = one > -torch.inf
    return (one.exp() * (one.where(kept, 0.0) - other.where(kept, 0.0))).sum(-1)
