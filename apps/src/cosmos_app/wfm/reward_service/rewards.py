"""Which rewards there are, by the names that a command line gives them."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cosmos_app.errors import DataError
from cosmos_wfm import REWARDS, RewardRequest

Scores = Mapping[str, Sequence[float]]
ScoreRequest = Callable[[RewardRequest], Scores]
"""From samples to lists of scores by their names; made once in the process that scores."""


def find_scorer(name: str, named: str) -> ScoreRequest:
    """Return what scores requests for a reward.

    Args:
        name: of the reward, and of its scores if it is one of ``REWARDS``.
        named: empty for a reward of ``REWARDS``, or the ``module:function`` of a ``ScoreRequest``.

    Raises:
        DataError: if there is no such reward.
    """
    if named:
        return _import(named)
    if name not in REWARDS:
        raise DataError(
            f"{name} is no reward; there are {', '.join(sorted(REWARDS))}, and your own as "
            "NAME=module:function"
        )
    reward = REWARDS[name]

    def score(request: RewardRequest) -> Scores:
        samples = zip(request.pixels(), request.prompts, strict=True)
        return {name: [reward(pixels, prompt) for pixels, prompt in samples]}

    return score


def _import(named: str) -> ScoreRequest:
    module, _, attribute = named.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"{named} is no module:function: {error}") from error
    return found
