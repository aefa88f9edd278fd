"""Prompts that are longer than a model's text encoder is given: what is behind its limit is cut.

Pipelines cut them without a word. So a run says it once, before its first step, and a forecast too.
"""

import logging
from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

from cosmos_wfm.adapter import DiffusionModelAdapter

MOST_LOOKED_AT = 2000
"""Prompts of a set; of a larger one as many, evenly spaced."""
_Item = TypeVar("_Item")


@runtime_checkable
class CutsPrompts(Protocol):
    """An adapter that knows how long a prompt may be."""

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of a prompt that its text encoder is given."""
        ...

    def prompt_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Return how many tokens each prompt has, counted as that limit counts them."""
        ...


def evenly_spaced(items: Sequence[_Item], most: int) -> list[_Item]:
    """Return all items, or ``most`` of them."""
    num = min(len(items), most)
    return [items[place * len(items) // num] for place in range(num)]


def cut_prompts(adapter: DiffusionModelAdapter, prompts: Sequence[str], what: str) -> str:
    """Return a sentence about prompts that are cut; an empty text if none is.

    Args:
        adapter: the model's.
        prompts: all of a set, or those of it that are looked at.
        what: they are, in the plural.
    """
    if not prompts or not isinstance(adapter, CutsPrompts):
        return ""
    looked_at = evenly_spaced(prompts, MOST_LOOKED_AT)
    lengths, most = adapter.prompt_tokens(looked_at), adapter.max_prompt_tokens
    num = sum(length > most for length in lengths)
    if not num:
        return ""
    return (
        f"{num:,} of {len(looked_at):,} {what} are longer than the {most} tokens that the text "
        f"encoder of {type(adapter.pipeline).__name__} is given, the longest {max(lengths):,}: "
        "what is behind them is cut off, in training as by the pipeline"
    )


def say_what_is_cut(adapter: DiffusionModelAdapter, prompts: Sequence[str], what: str) -> None:
    """Log ``cut_prompts`` as a warning; one rank of a run calls."""
    if found := cut_prompts(adapter, prompts, what):
        logging.getLogger(__name__).warning("%s", found)
