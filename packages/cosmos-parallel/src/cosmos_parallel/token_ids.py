"""Tokens and positions that a model has no embedding of are refused, before they are looked up."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from cosmos_parallel.errors import SampleLengthError, TokenIdError

_OFFSET = 2  # OPT and its relatives have two places before the first


def guard_token_ids(model: nn.Module) -> None:
    """Have a Hugging Face model refuse what its embeddings do not have from now on.

    Those are token ids beyond its vocabulary, and where positions are learned those beyond the
    last. On a GPU what is out of range ends the process with an assertion of the device; on a CPU
    the message does not say what it was.
    """
    # Any: not every module is a transformers model
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if isinstance(embedding, nn.Embedding):
        embedding.register_forward_pre_hook(_check)
        if longest := _learned_positions(model, embedding):
            hook = partial(_check_length, longest)
            model.register_forward_pre_hook(hook, with_kwargs=True)


def _check(embedding: nn.Module, args: tuple[Any, ...]) -> None:
    token_ids: Tensor = args[0]
    size = int(getattr(embedding, "num_embeddings", 0))
    if not token_ids.numel():
        return
    least, most = (int(value) for value in token_ids.aminmax())
    if least < 0 or most >= size:
        wrong = ((token_ids < 0) | (token_ids >= size)).nonzero()[0].tolist()
        found = int(token_ids[tuple(wrong)])
        place = f"row {wrong[0]}, column {wrong[1]}" if len(wrong) == 2 else f"place {wrong}"
        raise TokenIdError(
            f"token id {found} at {place} of the batch; the model's embedding has ids 0 to "
            f"{size - 1}: the tokenizer is not this model's"
        )


def _learned_positions(model: nn.Module, tokens: nn.Module) -> int:
    """Return how many positions a model has an embedding of; 0 where it computes them."""
    config: Any = getattr(model, "config", None)  # any Hugging Face configuration
    text = None if config is None else config.get_text_config()
    longest = int(getattr(text, "max_position_embeddings", None) or 0)
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens)
    is_learned = any(longest <= table.num_embeddings <= longest + _OFFSET for table in tables)
    return longest if is_learned else 0


def _check_length(
    longest: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    positions: Tensor | None = kwargs.get("position_ids")
    token_ids: Tensor | None = kwargs.get("input_ids", args[0] if args else None)
    if positions is not None:
        length = int(positions.max()) + 1 if positions.numel() else 0
    else:
        length = 0 if token_ids is None else token_ids.shape[-1]
    if length > longest:
        raise SampleLengthError(
            f"a sample of {length} tokens, padding included; {type(model).__name__} has learned "
            f"{longest} positions: leave longer ones out (max_tokens of the rows), or shorten them"
        )
