"""Whether prompts and answers are as long as a server takes."""

from collections.abc import Sequence

from cosmos_app.errors import ServerMismatchError
from cosmos_rollout import PromptError, PromptRow, Tokenizer, prompt_tokens


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
