"""Log-probabilities and entropies of target tokens, without the ``[B, T, V]`` logits.

A chunk of rows is projected onto the vocabulary, reduced to two numbers per row and thrown away;
backward projects it again. Memory is ``chunk * V`` floats, whatever B and T are.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

DEFAULT_CHUNK = 256


class TokenScores(NamedTuple):
    """Log-probability of each target, and entropy of the distribution it was drawn from (nats)."""

    logprobs: Float[Tensor, "*S"]
    entropies: Float[Tensor, "*S"]


def chunked_logprobs(
    hidden: Float[Tensor, "*S H"],
    weight: Float[Tensor, "V H"],
    targets: Int[Tensor, "*S"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    temperature: float = 1.0,
    chunk: int = DEFAULT_CHUNK,
) -> TokenScores:
    """Score targets under softmax((hidden weightᵀ + bias) / temperature), chunk by chunk.

    Equal to ``log_softmax(...).gather(...)``, gradients of hidden, weight and bias too. Logits and
    sums are float32 (float64 for float64 input) whatever the precision of the input.

    Args:
        hidden: last hidden states, any leading shape, none included.
        weight: the output embedding.
        targets: token ids, of the leading shape.
        bias: of the output embedding, if it has one.
        temperature: what the sampler divided logits by.
        chunk: rows projected at a time.

    Returns:
        Float32 (float64) log-probabilities and entropies of the leading shape.
    """
    shape = targets.shape
    logprobs, entropies = _ChunkedScores.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        targets.reshape(-1),
        (temperature, chunk),
    )
    return TokenScores(logprobs.reshape(shape), entropies.reshape(shape))


def scores_from_logits(
    logits: Float[Tensor, "*S V"],
    targets: Int[Tensor, "*S"],
    *,
    temperature: float = 1.0,
) -> TokenScores:
    """Score targets from logits that already exist, by plain log-softmax in float32 or better."""
    logp = torch.log_softmax(_accurate(logits) / temperature, dim=-1)
    chosen = logp.gather(-1, targets[..., None]).squeeze(-1)
    return TokenScores(chosen, -(logp.exp() * logp).sum(-1))


def _accurate(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


class _ChunkedScores(torch.autograd.Function):
    """Forward keeps two numbers per row; backward makes each chunk's softmax again.

    With z the scaled logits, p = softmax(z) and entropy H:
    ∂ log p_y / ∂z = 1_y - p and ∂H / ∂z = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,  # torch's own context object has no public type
        hidden: Float[Tensor, "N H"],
        weight: Float[Tensor, "V H"],
        bias: Float[Tensor, " V"] | None,
        targets: Int[Tensor, " N"],
        settings: tuple[float, int],
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of every row."""
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.settings = settings
        logprobs = _accurate(hidden.new_empty(hidden.shape[0]))
        entropies = torch.empty_like(logprobs)
        for start in range(0, hidden.shape[0], settings[1]):
            rows = slice(start, start + settings[1])
            logp = _chunk_log_softmax(hidden[rows], weight, bias, settings[0])
            logprobs[rows] = logp.gather(-1, targets[rows, None]).squeeze(-1)
            entropies[rows] = -(logp.exp() * logp).sum(-1)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        """Return gradients of hidden, weight and bias."""
        hidden, weight, bias, targets = ctx.saved_tensors
        temperature, chunk = ctx.settings
        grad_logprobs, grad_entropies = grad_outputs
        sums = _accurate(torch.zeros_like(weight))
        bias_sums = _accurate(weight.new_zeros(weight.shape[0]))
        grad_hidden = torch.empty_like(hidden)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logp = _chunk_log_softmax(hidden[rows], weight, bias, temperature)
            p = logp.exp()
            entropy = -(p * logp).sum(-1, keepdim=True)
            grad = -p * (grad_logprobs[rows, None] + grad_entropies[rows, None] * (logp + entropy))
            grad.scatter_add_(-1, targets[rows, None], grad_logprobs[rows, None])
            grad /= temperature
            grad_hidden[rows] = (grad.to(weight.dtype) @ weight).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                sums += grad.to(hidden.dtype).T @ hidden[rows]
            bias_sums += grad.sum(0)
        grad_weight = sums.to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else bias_sums.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


def _chunk_log_softmax(
    hidden: Float[Tensor, "C H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    temperature: float,
) -> Float[Tensor, "C V"]:
    logits = _accurate(torch.nn.functional.linear(hidden, weight, bias))
    return torch.log_softmax(logits / temperature, dim=-1)
