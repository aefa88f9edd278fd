"""The tokens that a server makes of a text, as vLLM's additions to OpenAI's completions have them.

Asked for with a text as the prompt and ``return_token_ids``, which answers to tokens need too.
"""

from collections.abc import Mapping
from typing import Any

from cosmos_rollout.errors import EngineError


def asked_tokens(text: str) -> dict[str, Any]:
    """Return what a request for the tokens of a text says beside the model."""
    return {
        "prompt": text,
        "max_tokens": 1,
        "add_special_tokens": False,
        "return_token_ids": True,
    }


def read_tokens(answer: Mapping[str, Any], whom: str) -> list[int]:
    """Return the tokens that a server told, without special ones around them.

    Args:
        answer: what it said.
        whom: its address, for messages.

    Raises:
        EngineError: if it does not tell.
    """
    try:
        return [int(token) for token in answer["choices"][0]["prompt_token_ids"]]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"{whom} does not tell the tokens of a text (return_token_ids)"
        ) from error
