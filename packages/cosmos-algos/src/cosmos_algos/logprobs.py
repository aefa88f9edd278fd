"""Log-probabilities and entropies of target tokens, without the ``[B, T, V]`` logits.

A chunk of rows is projected onto the vocabulary, reduced to two numbers per row and thrown away;
backward projects it again. Memory is ``chunk * V`` floats, whatever B and T are.
"""

from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cosmos_algos.errors import AlgorithmConfigError, ShapeError
from cosmos_algos.output_head import LogitScaling, OutputHead, accurate, output_head

DEFAULT_CHUNK = 256
_LEAST = -1e4
"""A log-probability whose exponential is 0 in every type, so that 0 log 0 is 0 and no NaN."""
_TOKEN_TYPES = (torch.int64, torch.int32)


class TokenScores(NamedTuple):
    """Log-probability of each target, and entropy of the distribution it was drawn from (nats)."""

    logprobs: Float[Tensor, "*S"]
    entropies: Float[Tensor, "*S"]


def chunked_logprobs(
    hidden: Float[Tensor, "*S H"],
    weight: Float[Tensor, "V H"] | OutputHead,
    targets: Int[Tensor, "*S"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    temperature: float = 1.0,
    chunk: int = DEFAULT_CHUNK,
) -> TokenScores:
    """Score targets under softmax((hidden weightᵀ + bias) / temperature), chunk by chunk.

    Equal to ``log_softmax(...).gather(...)``, gradients of hidden, weight and bias too. Logits and
    sums are float32 (float64 for float64 input) whatever the precision of the input. Under autocast
    the projection is in its type, as that of a linear layer.

    Args:
        hidden: last hidden states, any leading shape, none included.
        weight: the output embedding; or an ``OutputHead``, of models that multiply or bound what
            temperature then divides.
        targets: token ids, of the leading shape, all of the vocabulary; where there is nothing to
            score put any, and mask the result (-100 is no token).
        bias: of the output embedding, if it has one.
        temperature: what the sampler divided logits by.
        chunk: rows projected at a time.

    Returns:
        Float32 (float64) log-probabilities and entropies of the leading shape.

    Raises:
        AlgorithmConfigError: if ``chunk`` is below 1, or ``temperature`` not above 0.
        ShapeError: if there is not one target for each hidden state, or targets are no numbers of
            tokens.
    """
    check_chunk(chunk)
    head = output_head(weight, bias)
    _check_targets("hidden states", hidden, targets, temperature)
    hidden = _as_autocast(hidden)
    shape = targets.shape
    logprobs, entropies = _ChunkedScores.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        _as_autocast(head.weight),
        _as_autocast(head.bias),
        targets.reshape(-1),
        _Settings(temperature, chunk, head.scaling),
    )
    return TokenScores(logprobs.reshape(shape), entropies.reshape(shape))


def scores_from_logits(
    logits: Float[Tensor, "*S V"],
    targets: Int[Tensor, "*S"],
    *,
    temperature: float = 1.0,
) -> TokenScores:
    """Score targets from logits that already exist, by plain log-softmax in float32 or better.

    Raises:
        AlgorithmConfigError: if ``temperature`` is not above 0.
        ShapeError: if there is not one target for each row of logits, or targets are no numbers of
            tokens.
    """
    _check_targets("logits", logits, targets, temperature)
    logp = torch.log_softmax(accurate(logits) / temperature, dim=-1)
    chosen = logp.gather(-1, targets[..., None]).squeeze(-1)
    return TokenScores(chosen, _Entropies.apply(logp))


def check_chunk(chunk: int) -> None:
    """Refuse to project no rows at a time.

    Raises:
        AlgorithmConfigError: names the number.
    """
    if chunk < 1:
        raise AlgorithmConfigError(f"log-prob chunk is {chunk}; it must be 1 or more")


def check_temperature(temperature: float) -> None:
    """Refuse to divide logits by nothing.

    Raises:
        AlgorithmConfigError: names the number.
    """
    if not temperature > 0.0:
        raise AlgorithmConfigError(
            f"temperature is {temperature}; logits are divided by it, so it must be above 0"
        )


def _check_targets(name: str, rows: Tensor, targets: Tensor, temperature: float) -> None:
    check_temperature(temperature)
    if targets.dtype not in _TOKEN_TYPES:
        raise ShapeError(f"log-probs: targets are of {targets.dtype}; token ids are int64 or int32")
    if rows.shape[:-1] != targets.shape:
        raise ShapeError(
            f"log-probs: {name} {tuple(rows.shape)} need targets {tuple(rows.shape[:-1])}, and not "
            f"{tuple(targets.shape)}; a model's output at token t is for token t+1: pass "
            "logits[:, :-1] with ids[:, 1:]"
        )


_Values = TypeVar("_Values", Tensor, Tensor | None)


def _as_autocast(values: _Values) -> _Values:
    """Cast as autocast does for a linear layer, where autograd sees it.

    Inside ``_ChunkedScores`` only forward would be cast: backward runs outside of autocast.
    """
    if values is None or values.dtype == torch.float64:
        return values
    device = values.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return values
    return values.to(torch.get_autocast_dtype(device))


class _Entropies(torch.autograd.Function):
    """H = -Σ p log p of log p, where 0 log 0 is 0; ∂H / ∂ log p = -p (log p + 1).

    Nothing of the size of the logits is kept for backward but log p, which its own keeps too.
    """

    @staticmethod
    def forward(
        ctx: Any,  # torch's own context object has no public type
        logp: Float[Tensor, "*S V"],
    ) -> Tensor:
        """Return the entropy of every row."""
        ctx.save_for_backward(logp)
        bounded = logp.clamp(min=_LEAST)
        return -bounded.exp().mul_(bounded).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor:
        """Return the gradient of log p."""
        (logp,) = ctx.saved_tensors
        (grad,) = grad_outputs
        bounded = logp.clamp(min=_LEAST)
        return -grad[..., None] * bounded.exp() * (bounded + 1.0)


class _Settings(NamedTuple):
    """How logits become z, which is what is normalised, and how many rows do so at a time."""

    temperature: float
    chunk: int
    scaling: LogitScaling


class _ChunkedScores(torch.autograd.Function):
    """Forward keeps three numbers per row; backward makes each chunk's logits again.

    With z the logits over the temperature τ, p = softmax(z) and entropy H = -Σ p log p:
    ∂ log p_y / ∂z = 1_y - p and ∂H / ∂z = -p (log p + H). Of products x with a multiplier m and a
    cap c, z = c tanh(m x / c) / τ and ∂z / ∂x = (1 - tanh²) m / τ; without a cap tanh² is 0.
    """

    @staticmethod
    def forward(
        ctx: Any,  # torch's own context object has no public type
        hidden: Float[Tensor, "N H"],
        weight: Float[Tensor, "V H"],
        bias: Float[Tensor, " V"] | None,
        targets: Int[Tensor, " N"],
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of every row."""
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        logprobs = accurate(hidden.new_empty(hidden.shape[0]))
        entropies, normalisers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, hidden.shape[0], settings.chunk):
            rows = slice(start, start + settings.chunk)
            scaled = _scaled_(torch.nn.functional.linear(hidden[rows], weight, bias), settings)
            normalisers[rows] = scaled.logsumexp(-1)
            logp = scaled.sub_(normalisers[rows, None])
            logprobs[rows] = logp.gather(-1, targets[rows, None])[:, 0]
            logp.clamp_(min=_LEAST)
            entropies[rows] = -logp.exp().mul_(logp).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        """Return gradients of hidden, weight and bias, as far as they are asked for."""
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        settings: _Settings = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        sums = accurate(torch.zeros_like(weight)) if ctx.needs_input_grad[1] else None
        bias_sums = None if bias is None else accurate(torch.zeros_like(bias))
        for start in range(0, hidden.shape[0], settings.chunk):
            rows = slice(start, start + settings.chunk)
            products = torch.nn.functional.linear(hidden[rows], weight, bias)
            slope = settings.scaling.slope(products)
            scaled = _scaled_(products, settings)
            scores = TokenScores(normalisers[rows], entropies[rows])
            slopes = tuple(None if grad is None else grad[rows] for grad in grad_outputs)
            grad = _logit_gradient(scaled, scores, targets[rows], slopes)
            if not settings.scaling.changes_nothing:
                grad.mul_(slope)
            if settings.temperature != 1.0:
                grad.div_(settings.temperature)
            narrow = grad.to(weight.dtype)
            grad_hidden[rows] = (narrow @ weight).to(hidden.dtype)
            if sums is not None and sums.dtype == hidden.dtype:
                sums.addmm_(grad.T, hidden[rows])
            elif sums is not None:
                sums += narrow.to(hidden.dtype).T @ hidden[rows]
            if bias_sums is not None:
                bias_sums += grad.sum(0)
        grad_weight = None if sums is None else sums.to(weight.dtype)
        grad_bias = None if bias_sums is None else bias_sums.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


def _scaled_(products: Float[Tensor, "C V"], settings: _Settings) -> Float[Tensor, "C V"]:
    """Return z of products, in their own memory."""
    logits = accurate(settings.scaling.of_(products))
    return logits if settings.temperature == 1.0 else logits.div_(settings.temperature)


def _logit_gradient(
    scaled: Float[Tensor, "C V"],
    saved: TokenScores,
    targets: Int[Tensor, " C"],
    slopes: tuple[Tensor | None, ...],
) -> Float[Tensor, "C V"]:
    """Return the gradient of z, in its own memory.

    Args:
        scaled: z; overwritten.
        saved: log Σ e^z and H of each row, from forward.
        targets: y.
        slopes: gradients of log-probabilities and entropies; ``None`` for not asked for.
    """
    logp = scaled.sub_(saved.logprobs[:, None])
    of_logprobs, of_entropies = slopes
    if of_logprobs is None:
        of_logprobs = torch.zeros_like(saved.logprobs)
    if of_entropies is None:
        grad = logp.exp_().mul_(-of_logprobs[:, None])
    else:
        logp.clamp_(min=_LEAST)
        factors = (logp + saved.entropies[:, None]).mul_(of_entropies[:, None])
        grad = factors.add_(of_logprobs[:, None]).mul_(logp.exp_()).neg_()
    return grad.scatter_add_(-1, targets[:, None], of_logprobs[:, None])
