"""Tokens that a model's embedding does not have are refused by name, before they are looked up."""

from typing import Any

from torch import Tensor, nn

from cosmos_parallel.errors import TokenIdError


def guard_token_ids(model: nn.Module) -> None:
    """Have a Hugging Face model refuse token ids beyond its vocabulary from now on.

    On a GPU an id that is out of range ends the process with an assertion of the device; on a CPU
    the message does not say which token it was.
    """
    # Any: not every module is a transformers model
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if isinstance(embedding, nn.Embedding):
        embedding.register_forward_pre_hook(_check)


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
