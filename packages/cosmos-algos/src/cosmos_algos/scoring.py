"""Scores of a batch's targets under a Hugging Face causal language model, FSDP2 or not.

The output head is asked for scores in place of logits *inside* the model's own forward: a hook in
front of it keeps the hidden states and lets one column through, a hook behind it returns the
chunked scores as the head's output. So every hook of FSDP2 sees an ordinary forward pass, and the
head's weight is whole when it is used, forward and backward. What the model does to logits behind
its head is done to each chunk's; what it then makes of the scores is only compared with.
"""

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cosmos_algos.batch import TokenBatch
from cosmos_algos.distillation import TopK
from cosmos_algos.errors import ModelHeadError
from cosmos_algos.head_scaling import HeadScaling, head_scaling
from cosmos_algos.head_scores import Asked, CandidateScores, LikeliestScores, TargetScores
from cosmos_algos.logprobs import DEFAULT_CHUNK, TokenScores
from cosmos_algos.output_head import LogitScaling, OutputHead
from cosmos_algos.rows import check_rows, position_ids


def model_scores(
    model: nn.Module, batch: TokenBatch, *, temperature: float = 1.0, chunk: int = DEFAULT_CHUNK
) -> TokenScores:
    """Run the model once over a batch and score its trainable targets.

    Rows are right-padded and the model is causal, so no attention mask is passed: no real token
    sees padding. Rows of several samples are told apart by position ids that start again.

    Args:
        model: a Hugging Face causal language model, sharded by FSDP2, within DDP, or whole.
        batch: what to score.
        temperature: what the sampler divided logits by.
        chunk: targets projected onto the vocabulary at a time; 0 makes the whole logits.

    Returns:
        ``[B, T]`` log-probabilities and entropies, 0 where not trainable.

    Raises:
        ModelHeadError: if the model has no output head, or changes what it returns in a way that
            its configuration does not tell.
        ShapeError: if rows are padded on the left, or targets are not the tokens that come next.
    """
    found = _of_head(model, batch, TargetScores(batch, temperature, chunk), chunk)
    return TokenScores(found[..., 0], found[..., 1])


def scores_and_candidates(
    model: nn.Module,
    batch: TokenBatch,
    token_ids: Int[Tensor, "B T K"],
    *,
    temperature: float = 1.0,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[TokenScores, Float[Tensor, "B T K"]]:
    """Run the model once; score its targets, and K other tokens that could stand in each's place.

    Args:
        model: as for `model_scores`.
        batch: what to score.
        token_ids: the other tokens, such as those that a teacher finds likeliest.
        temperature: what the sampler divided logits by.
        chunk: targets projected onto the vocabulary at a time; 0 makes the whole logits.

    Returns:
        Scores, and log-probabilities of the other tokens; 0 where not trainable, and -inf of a
        token beyond the model's vocabulary.

    Raises:
        ModelHeadError: as `model_scores`.
    """
    asked = CandidateScores(batch, temperature, chunk, token_ids[batch.trainable])
    found = _of_head(model, batch, asked, chunk)
    return TokenScores(found[..., 0], found[..., 1]), found[..., 2:]


@torch.no_grad()
def scores_and_likeliest(
    model: nn.Module,
    batch: TokenBatch,
    k: int,
    *,
    temperature: float = 1.0,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[TokenScores, TopK]:
    """Run a model that is not trained once; score targets, and find the K likeliest in their place.

    Args:
        model: as for `model_scores`.
        batch: what to score.
        k: how many; no more than the vocabulary has.
        temperature: logits are divided by it.
        chunk: targets projected onto the vocabulary at a time; 0 makes the whole logits.

    Returns:
        Scores, and ``[B, T, K]`` log-probabilities and token ids; 0 where not trainable.

    Raises:
        ModelHeadError: as `model_scores`.
    """
    asked = LikeliestScores(batch, temperature, chunk, k)
    found = _of_head(model, batch, asked, chunk)
    rows = batch.trainable
    token_ids = torch.zeros(*rows.shape, k, dtype=torch.long, device=found.device)
    token_ids[rows] = asked.token_ids
    return TokenScores(found[..., 0], found[..., 1]), TopK(found[..., 2:], token_ids)


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
    hook = _find_head(model).register_forward_pre_hook(asked.value, prepend=True)
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
    hook = _find_head(model).register_forward_pre_hook(asked.value_only, prepend=True)
    try:
        model(**_inputs(batch))
    finally:
        hook.remove()
    return asked.answer(batch)


class _ValueHead:
    """A hook before the output head, which sees all hidden states.

    FSDP2 has gathered the root's parameters by then, and the value head is one of them. It comes
    before what lays hidden states out for a head that is split.
    """

    def __init__(self, model: nn.Module) -> None:
        head = getattr(_whole(model), "value_head", None)
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


def _of_head(
    model: nn.Module, batch: TokenBatch, asked: Asked, chunk: int
) -> Float[Tensor, "B T C"]:
    """Run the model once and return what is asked of its head, 0 where not trainable."""
    check_rows(batch)
    head = _find_head(model)
    scaling = head_scaling(_whole(model), head) if isinstance(head, nn.Linear) else None
    if chunk == 0 or scaling is None:
        logits = model(**_inputs(batch)).logits
        return _laid_out(asked.of_logits(logits[batch.trainable]), batch)
    hooks = _HeadHooks(batch, asked, scaling)
    handles = (
        head.register_forward_pre_hook(hooks.keep_hidden),
        head.register_forward_hook(hooks.score_hidden, prepend=True),
        head.register_forward_hook(hooks.score_logits),
    )
    try:
        returned = model(**_inputs(batch)).logits
    finally:
        for handle in handles:
            handle.remove()
    answer = hooks.answer
    if answer is None or not _came_through(answer, returned, scaling.behind):
        raise ModelHeadError(
            f"{type(model).__name__} changes what its output head returns, so scores cannot be "
            "taken from the head: set the log-prob chunk to 0"
        )
    return returned if scaling.behind.changes_nothing else _Answer.apply(answer, returned)


def _came_through(answer: Tensor, returned: Tensor, behind: LogitScaling) -> bool:
    """Return whether the model did to an answer what it was expected to do."""
    if behind.changes_nothing:
        return returned is answer or torch.equal(returned, answer)
    with torch.no_grad():
        wanted = behind.of(answer)
        found = returned.to(wanted.dtype)
        # in the type of the model, which may have 8 bits
        return torch.allclose(found, wanted, rtol=0.01, atol=1e-5, equal_nan=True)


class _Answer(torch.autograd.Function):
    """An answer, whose backward pass begins where the model's does: with what the model returned.

    FSDP2 and DDP wait there for a gradient; that of what the model made of the answer is 0.
    """

    @staticmethod
    def forward(
        ctx: Any,  # torch's own context object has no public type
        answer: Float[Tensor, "B T C"],
        returned: Float[Tensor, "B T C"],
    ) -> Tensor:
        """Return the answer."""
        ctx.returned_type = returned.dtype
        return answer.view_as(answer)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor]:
        """Pass the gradient to the answer, and zeros to the rest."""
        (grad,) = grad_outputs
        return grad, torch.zeros_like(grad, dtype=ctx.returned_type)


class _HeadHooks:
    """The pair of hooks of one forward pass, and what passes between them."""

    def __init__(self, batch: TokenBatch, asked: Asked, scaling: HeadScaling) -> None:
        self.answer: Float[Tensor, "B T C"] | None = None
        self._batch = batch
        self._asked = asked
        self._scaling = scaling
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

    def score_hidden(self, head: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Return ``[B, T, C]`` answers in place of the first column, while the weight is whole."""
        if self._hidden is None:
            return None
        weights = cast("nn.Linear", head)
        found = self._asked.of_hidden(
            self._hidden[self._batch.trainable],
            OutputHead(weights.weight, weights.bias, self._scaling.whole),
        )
        self.answer = _laid_out(found, self._batch)
        return self.answer

    def score_logits(self, head: nn.Module, args: tuple[Any, ...], logits: Tensor) -> Tensor | None:
        """Return ``[B, T, C]`` answers in place of a split head's logits, once it joined them."""
        if self._hidden is not None:
            return None
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        wanted = self._scaling.behind.of(whole[self._batch.trainable])
        self.answer = _laid_out(self._asked.of_logits(wanted), self._batch)
        return self.answer


def _laid_out(found: Float[Tensor, "N C"], batch: TokenBatch) -> Float[Tensor, "B T C"]:
    rows = batch.trainable
    return found.new_zeros(*rows.shape, found.shape[-1]).index_put((rows,), found)


def _inputs(batch: TokenBatch) -> dict[str, Tensor | bool]:
    inputs: dict[str, Tensor | bool] = {"input_ids": batch.token_ids, "use_cache": False}
    if batch.segments is not None:
        inputs["position_ids"] = position_ids(batch.segments)
    return {**inputs, **batch.image_arguments()}


def _whole(model: nn.Module) -> nn.Module:
    """Return the model that DDP calls."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _find_head(model: nn.Module) -> nn.Module:
    model = _whole(model)
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if getter is not None else None
    if not isinstance(head, nn.Module):
        raise ModelHeadError(
            f"{type(model).__name__} has no output embeddings; a causal language model is needed"
        )
    return head
