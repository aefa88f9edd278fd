"""Whether an engine could serve the prompts of a recipe: how long they are, and of which tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_app.errors import DataError
from cosmos_app.prompt_rows import prompt_rows
from cosmos_app.recipe import Recipe
from cosmos_parallel import read_config
from cosmos_rollout import (
    EndpointConfig,
    EngineConfig,
    GenerationRequest,
    PromptError,
    PromptTooLongError,
    Sampling,
    ScriptedConfig,
    check_request,
    longest_context,
    prompt_row,
    prompt_tokens,
)

_ALL_OF_THE_FIRST = 256
_THEN_EVERY = 64
_NO_LIMIT = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What an engine takes, as far as its settings and its model say.

    Attributes:
        context_length: most tokens of prompt and response.
        vocabulary_size: token ids are below this.
    """

    context_length: int
    vocabulary_size: int


def limits_of(engine: EngineConfig, model: Path, *, is_played: bool) -> Limits:
    """Return the limits of an engine of a recipe.

    Args:
        engine: its settings.
        model: the model's directory.
        is_played: an environment opens with words of its own, of unknown length.
    """
    size = int(read_config(model).get_text_config().vocab_size)
    if isinstance(engine, EndpointConfig | ScriptedConfig):
        size = engine.vocabulary_size or _NO_LIMIT
    length = engine.context_length
    if not length and not isinstance(engine, EndpointConfig):
        length = longest_context(model) or 0
    return Limits(
        context_length=_NO_LIMIT if is_played or not length else length, vocabulary_size=size
    )


def check_prompts(recipe: Recipe) -> tuple[str, ...]:
    """Look whether the prompts of a recipe's data could be served, without starting an engine.

    Of a file it looks at every row whose bytes could be more tokens than there is room for, at the
    first 256, and at each 64th after them. Rows with pictures or videos, whose length is the
    engine's to say, are left out, and so are models that are built.

    Returns:
        A warning for each file of which the engine will refuse some rows; they are dropped and
        counted as a run comes to them.

    Raises:
        DataError: if it will refuse all of a file, or has no room for some of it and
            ``data.too_long`` says "refuse".
    """
    model = recipe.model.path
    paths = [p for source in recipe.data.sources for p in (source.path, source.held_out_path) if p]
    if model is None or not paths:
        return ()
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    is_played = recipe.rollout.environment is not None
    limits = limits_of(recipe.rollout.engine, model, is_played=is_played)
    said: list[str] = []
    for path in paths:
        found = _look_at(path, limits, tokenizer)
        if found.too_long and recipe.data.too_long == "refuse":
            raise DataError(
                f"{found.describe(found.too_long, 'which are too long')}; raise "
                "rollout.engine.context_length, take them out, or have them dropped by "
                'data.too_long="drop"'
            )
        if found.refused:
            said.append(found.describe(found.refused, "which will be dropped"))
    return tuple(said)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """What is said of the prompts of a file that an engine will refuse.

    Attributes:
        path: the file.
        looked_at: how many were looked at.
        refused: of each that will be refused, why.
        too_long: the same of those that there is no room for.
    """

    path: Path
    looked_at: int
    refused: Sequence[str]
    too_long: Sequence[str]

    def describe(self, which: Sequence[str], what: str) -> str:
        """Return how many of those looked at these are, what of them, and one of them."""
        return (
            f"data file {self.path}: rollout.engine cannot serve {len(which)} of the "
            f"{self.looked_at} prompts looked at, {what}, such as {which[0]}"
        )


def _look_at(path: Path, limits: Limits, tokenizer: Any) -> _Found:
    """Return what the engine will refuse of a file.

    Raises:
        DataError: if no row can be served.
    """
    looked_at, refused, too_long = 0, list[str](), list[str]()
    of_template = 0  # at most: all tokens of the first prompt
    for number, row in enumerate(prompt_rows(path), 1):
        if row.get("images") or row.get("videos"):
            continue
        is_chosen = number <= _ALL_OF_THE_FIRST or not number % _THEN_EVERY
        if not is_chosen and _most_tokens(row) + of_template < limits.context_length:
            continue
        looked_at += 1
        try:
            num_tokens = _checked(row, f"row {number}", limits, tokenizer)
            of_template = of_template or num_tokens
        except PromptError as error:
            refused.append(str(error).removeprefix("request "))
            if isinstance(error, PromptTooLongError):
                too_long.append(refused[-1])
    if refused and len(refused) == looked_at:
        raise DataError(
            f"data file {path}: rollout.engine cannot serve any of the {looked_at} prompts looked "
            f"at, such as {refused[0]}"
        )
    return _Found(path=path, looked_at=looked_at, refused=refused, too_long=too_long)


def _most_tokens(row: Mapping[str, Any]) -> int:
    """Return what the texts of a row cannot be more tokens than: their bytes, and those of JSON."""
    return len(json.dumps(dict(row), ensure_ascii=False, default=str).encode(errors="replace"))


def _checked(row: Mapping[str, Any], where: str, limits: Limits, tokenizer: Any) -> int:
    """Return how many tokens the prompt of a row has.

    Raises:
        PromptError: if the engine will refuse it.
    """
    tokens = prompt_tokens(prompt_row(row, where, default_id=where), tokenizer)
    request = GenerationRequest(
        request_id=where, prompt_token_ids=tokens, sampling=Sampling(max_new_tokens=1)
    )
    check_request(
        request, context_length=limits.context_length, vocabulary_size=limits.vocabulary_size
    )
    return len(tokens)
