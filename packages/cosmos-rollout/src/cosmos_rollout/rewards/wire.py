"""A sample as a service is asked for its reward: JSON, read back as it was before.

`ServiceReward` writes it; `sample_from_json` is for whoever answers.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from cosmos_rollout.errors import RewardRequestError
from cosmos_rollout.rewards.scoring import RewardInput


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_item, value))


# Of an answer that is no text, the reward that compares with it says so.
_WANTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (_is_text, "a text"),
    "response": (_is_text, "a text"),
    "finish_reason": (_is_text, "a text"),
    "fields": (_is_object, "an object"),
    "num_prompt_tokens": (_is_count, "a whole number"),
    "num_response_tokens": (_is_count, "a whole number"),
    "messages": (_is_list_of(_is_object), "a list of objects"),
    "images": (_is_list_of(_is_text), "a list of texts"),
}
_KNOWN = frozenset(field.name for field in fields(RewardInput))
_NEEDED = tuple(
    field.name
    for field in fields(RewardInput)
    if field.default is MISSING and field.default_factory is MISSING
)


def sample_from_json(body: bytes) -> RewardInput:
    """Read the sample that a service is asked about.

    Args:
        body: a JSON object with the fields of `RewardInput`, by their names; those that have a
            default may be left out.

    Raises:
        RewardRequestError: if it is no such object, saying what of it is not as it must be.
    """
    given = _object(body)
    missing = [name for name in _NEEDED if name not in given]
    if missing:
        raise RewardRequestError(f"the sample has no {missing[0]!r}")
    unknown = sorted(given.keys() - _KNOWN)
    if unknown:
        raise RewardRequestError(
            f"the sample has {unknown[0]!r}, which is not known here; there are "
            f"{', '.join(sorted(_KNOWN))}"
        )
    for name, (is_right, wanted) in _WANTED.items():
        if name in given and not is_right(given[name]):
            raise RewardRequestError(f"{name} has to be {wanted}")
    for name in ("messages", "images"):
        given[name] = tuple(given.get(name, ()))
    return RewardInput(**given)


def _object(body: bytes) -> dict[str, Any]:
    try:
        given: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RewardRequestError(f"the body is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise RewardRequestError("the body is no JSON object")
    return given
