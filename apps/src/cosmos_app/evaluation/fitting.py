"""Whether a server can be asked a recipe's prompts at all: its tokens, and how many it takes."""

from collections.abc import Sequence
from itertools import islice

from cosmos_app.errors import ServerMismatchError
from cosmos_rollout import (
    EndpointEngine,
    EngineError,
    PromptError,
    PromptRow,
    Tokenizer,
    prompt_tokens,
)

_MOST_TEXTS = 4
_MOST_LETTERS = 400


async def compare_tokens(
    engine: EndpointEngine, tokenizer: Tokenizer, rows: Sequence[PromptRow]
) -> str:
    """Have the server put some prompts into tokens, and compare them with the tokenizer's.

    Returns:
        A warning if the server does not tell its tokens; otherwise nothing.

    Raises:
        ServerMismatchError: if it has other tokens, naming the first that differs.
    """
    texts = (_text_of(row, tokenizer) for row in rows)
    for text in islice((text for text in texts if text.strip()), _MOST_TEXTS):
        ours = tokenizer.encode(text, add_special_tokens=False)
        try:
            theirs = await engine.tokens_of(text)
        except EngineError as error:
            return f"whether the server has the tokens of the recipe's model is not known: {error}"
        if ours != theirs:
            raise ServerMismatchError(
                f"the server has other tokens than the recipe's model: {_difference(ours, theirs)} "
                f"of {text[:40]!r}; set model.path to a directory with the server's tokenizer"
            )
    return ""


def require_room(
    context_length: int, lengths: Sequence[int], *, most_new: int, most_there: int
) -> None:
    """Look whether prompts and answers are no longer than the server takes.

    Args:
        context_length: most tokens that the server takes.
        lengths: of prompts, in tokens.
        most_new: longest answer.
        most_there: context of the recipe's own engine, 0 for as long as it takes: it would cut
            answers too.

    Raises:
        ServerMismatchError: saying how long a context it needs.
    """
    longest = max(lengths, default=0)
    wanted = longest + most_new
    if most_there:
        wanted = min(wanted, most_there)
    if context_length < wanted:
        raise ServerMismatchError(
            f"the server's context is {context_length} tokens; the longest prompt has "
            f"{longest} and an answer up to {most_new}: serve it with {wanted} (vllm serve "
            f"--max-model-len {wanted}), or set validation.max_new_tokens lower"
        )


def lengths_of(rows: Sequence[PromptRow], tokenizer: Tokenizer) -> list[int]:
    """Return how many tokens prompts have; those that the tokenizer does not take are left out."""
    found: list[int] = []
    for row in rows:
        try:
            found.append(len(prompt_tokens(row, tokenizer)))
        except PromptError:
            continue  # it will be dropped, and counted
    return found


def _text_of(row: PromptRow, tokenizer: Tokenizer) -> str:
    try:
        tokens = prompt_tokens(row, tokenizer)
    except PromptError:
        return ""
    return tokenizer.decode(tokens, skip_special_tokens=True)[:_MOST_LETTERS]


def _difference(ours: Sequence[int], theirs: Sequence[int]) -> str:
    pairs = zip(ours, theirs, strict=False)
    for place, (own, other) in enumerate(pairs):
        if own != other:
            return f"token {place} is {other} there and {own} here,"
    return f"{len(theirs)} tokens there and {len(ours)} here,"
