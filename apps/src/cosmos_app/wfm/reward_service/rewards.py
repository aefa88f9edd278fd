"""Which rewards there are, by the names that a command line gives them."""

import importlib
import re
from typing import Any

from cosmos_app.errors import DataError
from cosmos_wfm import (
    MODEL_REWARDS,
    REWARDS,
    RewardRequest,
    ScoreRequest,
    WfmError,
    load_model_reward,
)


def find_scorer(name: str, named: str) -> ScoreRequest:
    """Return what scores requests for a reward.

    Args:
        name: of the reward, and of its scores if it is one of ``REWARDS``.
        named: empty for a reward of ``REWARDS``, the directory or address of one of
            ``MODEL_REWARDS``, or the ``module:function`` of a ``ScoreRequest``.

    Raises:
        DataError: if there is no such reward, or its model cannot be loaded.
    """
    if name in MODEL_REWARDS and not _is_own(named):
        try:
            return load_model_reward(name, named)
        except WfmError as error:
            raise DataError(str(error)) from error
    if named:
        return _import(named)
    if name not in REWARDS:
        raise DataError(
            f"{name} is no reward; there are {', '.join(sorted(REWARDS))}, models as "
            f"NAME=DIRECTORY ({', '.join(MODEL_REWARDS)}), and your own as NAME=module:function"
        )
    reward = REWARDS[name]

    def score(request: RewardRequest) -> dict[str, list[float]]:
        samples = zip(request.pixels(), request.prompts, strict=True)
        return {name: [reward(pixels, prompt) for pixels, prompt in samples]}

    return score


def check_reward(name: str, named: str) -> None:
    """Refuse a reward that there is not, without loading a model.

    Raises:
        DataError: if there is no such reward, or a model is not said where to be.
    """
    if name not in MODEL_REWARDS or _is_own(named):
        find_scorer(name, named)
    elif not named:
        raise DataError(f"{name} is a model: say where it is, as {name}=DIRECTORY")


def _is_own(named: str) -> bool:
    """Return whether it is a ``module:function``, and no directory and no address."""
    return re.fullmatch(r"[\w.]+:\w+", named) is not None


def _import(named: str) -> ScoreRequest:
    module, _, attribute = named.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"{named} is no module:function: {error}") from error
    return found
