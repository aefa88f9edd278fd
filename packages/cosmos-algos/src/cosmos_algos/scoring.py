"""Scores of a batch's targets under a Hugging Face causal language model, FSDP2 or not.

The output head is asked for scores in place of logits *inside* the model's own forward: a hook in
front of it keeps the hidden states and lets one column through, a hook behind it returns the
chunked scores as the head's output. So every hook of FSDP2 sees an ordinary forward pass, and the
head's weight is whole when it is used, forward and backward.
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmos_algos.batch import TokenBatch
from cosmos_algos.errors import ModelHeadError
from cosmos_algos.logprobs import (
    DEFAULT_CHUNK,
    TokenScores,
    chunked_logprobs,
    scores_from_logits,
)
from cosmos_algos.rows import position_ids

# Settings by which a model changes logits after its head (Gemma, Cohere, Granite, Falcon-H1).
_LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


def model_scores(
    model: nn.Module, batch: TokenBatch, *, temperature: float = 1.0, chunk: int = DEFAULT_CHUNK
) -> TokenScores:
    """Run the model once over a batch and score its trainable targets.

    Rows are right-padded and the model is causal, so no attention mask is passed: no real token
    sees padding. Rows of several samples are told apart by position ids that start again.

    Args:
        model: a Hugging Face causal language model, sharded by FSDP2 or whole.
        batch: what to score.
        temperature: what the sampler divided logits by.
        chunk: targets projected onto the vocabulary at a time; 0 makes the whole logits.

    Returns:
        ``[B, T]`` log-probabilities and entropies, 0 where not trainable.

    Raises:
        ModelHeadError: if the model has no linear output head, or changes what its head returns.
    """
    head = _find_head(model)
    if chunk == 0 or _changes_logits(model) or not isinstance(head, nn.Linear):
        logits = model(**_inputs(batch)).logits
        return _masked(scores_from_logits(logits, batch.targets, temperature=temperature), batch)
    asked = _ScoringHead(batch, temperature, chunk)
    hooks = (
        head.register_forward_pre_hook(asked.keep_hidden),
        head.register_forward_hook(asked.replace_output, prepend=True),
    )
    try:
        returned = model(**_inputs(batch)).logits
    finally:
        for hook in hooks:
            hook.remove()
    answer = asked.answer
    if answer is None or (returned is not answer and not torch.equal(returned, answer)):
        raise ModelHeadError(
            f"{type(model).__name__} changes what its output head returns, so scores cannot be "
            "taken from the head: set the log-prob chunk to 0"
        )
    return TokenScores(returned[..., 0], returned[..., 1])


def scores_and_values(
    model: nn.Module, batch: TokenBatch, *, temperature: float = 1.0, chunk: int = DEFAULT_CHUNK
) -> tuple[TokenScores, Float[Tensor, "B T"]]:
    """Run the model once; score its targets, and value the states that they are drawn in.

    Args:
        model: as for `model_scores`, with a child ``value_head`` from hidden states to one number.
        batch: what to score.
        temperature: what the sampler divided logits by.
        chunk: targets projected onto the vocabulary at a time; 0 makes the whole logits.

    Raises:
        ModelHeadError: as `model_scores`, and if the model has no value head.
    """
    asked = _ValueHead(model)
    hook = _find_head(model).register_forward_pre_hook(asked.value)
    try:
        scores = model_scores(model, batch, temperature=temperature, chunk=chunk)
    finally:
        hook.remove()
    return scores, asked.answer(batch)


def head_values(model: nn.Module, batch: TokenBatch) -> Float[Tensor, "B T"]:
    """Run a model with a ``value_head`` once and return its values of all columns.

    Raises:
        ModelHeadError: if the model has no value head, or no output head before which it stands.
    """
    asked = _ValueHead(model)
    hook = _find_head(model).register_forward_pre_hook(asked.value_only)
    try:
        model(**_inputs(batch))
    finally:
        hook.remove()
    return asked.answer(batch)


class _ValueHead:
    """A hook before the output head, which sees all hidden states.

    FSDP2 has gathered the root's parameters by then, and the value head is one of them.
    """

    def __init__(self, model: nn.Module) -> None:
        head = getattr(model, "value_head", None)
        if not isinstance(head, nn.Module):
            raise ModelHeadError(
                f"{type(model).__name__} has no child value_head, which a critic needs: load it "
                "with one"
            )
        self._head = head
        self._values: Tensor | None = None

    def value(self, head: nn.Module, args: tuple[Any, ...]) -> None:
        """Value every column."""
        del head
        values = self._head(args[0])[..., 0]
        self._values = values if values.dtype == torch.float64 else values.float()

    def value_only(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Value every column, and let one of them through to the output head."""
        self.value(head, args)
        return (args[0][:, :1], *args[1:])

    def answer(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Return the values of the pass."""
        if self._values is None or self._values.shape != batch.token_ids.shape:
            raise ModelHeadError("the output head was not called with a hidden state per token")
        return self._values


class _ScoringHead:
    """The pair of hooks of one forward pass, and what passes between them."""

    def __init__(self, batch: TokenBatch, temperature: float, chunk: int) -> None:
        self.answer: Float[Tensor, "B T 2"] | None = None
        self._batch = batch
        self._temperature = temperature
        self._chunk = chunk
        self._hidden: Tensor | None = None

    def keep_hidden(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Keep all hidden states and project the first column only, unless the head is sharded.

        FSDP2 has gathered the weight by now; one that is still a DTensor is split by tensor
        parallelism, and that head projects everything itself.
        """
        if isinstance(head.weight, DTensor):
            return None
        self._hidden = args[0]
        return (args[0][:, :1], *args[1:])

    def replace_output(self, head: nn.Module, args: tuple[Any, ...], logits: Tensor) -> Tensor:
        """Return ``[B, T, 2]`` scores in place of logits."""
        batch, rows = self._batch, self._batch.trainable
        if self._hidden is None:
            whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
            scores = scores_from_logits(whole, batch.targets, temperature=self._temperature)
            self.answer = torch.stack(_masked(scores, batch), dim=-1)
            return self.answer
        chosen = chunked_logprobs(
            self._hidden[rows],
            cast("nn.Linear", head).weight,
            batch.targets[rows],
            bias=cast("nn.Linear", head).bias,
            temperature=self._temperature,
            chunk=self._chunk,
        )
        pair = torch.stack(chosen, dim=-1)
        self.answer = pair.new_zeros(*rows.shape, 2).index_put((rows,), pair)
        return self.answer


def _inputs(batch: TokenBatch) -> dict[str, Tensor | bool]:
    inputs: dict[str, Tensor | bool] = {"input_ids": batch.token_ids, "use_cache": False}
    if batch.segments is not None:
        inputs["position_ids"] = position_ids(batch.segments)
    return inputs


def _masked(scores: TokenScores, batch: TokenBatch) -> TokenScores:
    return TokenScores(*(values.where(batch.trainable, 0.0) for values in scores))


def _find_head(model: nn.Module) -> nn.Module:
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if getter is not None else None
    if not isinstance(head, nn.Module):
        raise ModelHeadError(
            f"{type(model).__name__} has no output embeddings; a causal language model is needed"
        )
    return head


def _changes_logits(model: nn.Module) -> bool:
    config: Any = getattr(model, "config", None)  # any Hugging Face configuration
    if config is None:
        return False
    text = config.get_text_config()
    return any(getattr(text, name, None) not in {None, 1} for name in _LOGIT_SETTINGS)
