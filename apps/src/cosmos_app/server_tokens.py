"""Whether a server of somebody else has the tokens of a recipe's model: it is asked for some."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice

from cosmos_app.errors import ServerMismatchError
from cosmos_rollout import (
    EngineError,
    PromptError,
    PromptRow,
    TeacherError,
    Tokenizer,
    prompt_tokens,
)

_MOST_TEXTS = 4
_MOST_LETTERS = 400


async def compare_tokens(
    tokens_of: Callable[[str], Awaitable[list[int]]],
    whom: str,
    tokenizer: Tokenizer,
    rows: Iterable[PromptRow],
) -> str:
    """Have a server put some prompts into tokens, and compare them with the tokenizer's.

    Args:
        tokens_of: asks the server for the tokens of a text, without special ones around it.
        whom: the server, for messages.
        tokenizer: of the recipe's model.
        rows: the prompts, of which the first few are taken.

    Returns:
        A warning if the server does not tell its tokens; otherwise nothing.

    Raises:
        ServerMismatchError: if it has other tokens, naming the first that differs.
    """
    texts = (_text_of(row, tokenizer) for row in rows)
    for text in islice((text for text in texts if text.strip()), _MOST_TEXTS):
        ours = tokenizer.encode(text, add_special_tokens=False)
        try:
            theirs = await tokens_of(text)
        except (EngineError, TeacherError) as error:
            return f"whether {whom} has the tokens of the recipe's model is not known: {error}"
        if ours != theirs:
            raise ServerMismatchError(
                f"{whom} has other tokens than the recipe's model: {_difference(ours, theirs)} of "
                f"{text[:40]!r}; model.path has to have the tokenizer of the server"
            )
    return ""


def _text_of(row: PromptRow, tokenizer: Tokenizer) -> str:
    try:
        tokens = prompt_tokens(row, tokenizer)
    except PromptError:
        return ""
    return tokenizer.decode(tokens, skip_special_tokens=True)[:_MOST_LETTERS]


def _difference(ours: Sequence[int], theirs: Sequence[int]) -> str:
    for place, (own, other) in enumerate(zip(ours, theirs, strict=False)):
        if own != other:
            return f"token {place} is {other} there and {own} here,"
    return f"{len(theirs)} tokens there and {len(ours)} here,"
