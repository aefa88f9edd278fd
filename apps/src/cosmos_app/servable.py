"""Whether an engine could serve the prompts of a recipe: how long they are, and of which tokens."""

from collections.abc import Mapping
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

    Of a long file it looks at the first 256 rows and at each 64th after them; rows with pictures
    or videos, whose length is the engine's to say, are left out, and so are models that are built.

    Returns:
        A warning for each file of which the engine will refuse some rows; they are dropped and
        counted as a run comes to them.

    Raises:
        DataError: if it will refuse all of a file.
    """
    model = recipe.model.path
    paths = [p for source in recipe.data.sources for p in (source.path, source.held_out_path) if p]
    if model is None or not paths:
        return ()
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    is_played = recipe.rollout.environment is not None
    limits = limits_of(recipe.rollout.engine, model, is_played=is_played)
    said = (_check_file(path, limits, tokenizer) for path in paths)
    return tuple(warning for warning in said if warning)


def _check_file(path: Path, limits: Limits, tokenizer: Any) -> str:
    """Return what to warn of; empty if nothing.

    Raises:
        DataError: if no row can be served.
    """
    looked_at, refused = 0, list[str]()
    for number, row in enumerate(prompt_rows(path), 1):
        if number > _ALL_OF_THE_FIRST and number % _THEN_EVERY:
            continue
        if row.get("images") or row.get("videos"):
            continue
        looked_at += 1
        if words := _refusal(row, f"row {number}", limits, tokenizer):
            refused.append(words)
    if not refused:
        return ""
    said = f"data file {path}: rollout.engine cannot serve"
    if len(refused) == looked_at:
        raise DataError(f"{said} any of the {looked_at} prompts looked at, such as {refused[0]}")
    return (
        f"{said} {len(refused)} of the {looked_at} prompts looked at, which will be dropped, such "
        f"as {refused[0]}"
    )


def _refusal(row: Mapping[str, Any], where: str, limits: Limits, tokenizer: Any) -> str:
    """Return what is wrong with the prompt of a row; empty if nothing is."""
    try:
        tokens = prompt_tokens(prompt_row(row, where, default_id=where), tokenizer)
        request = GenerationRequest(
            request_id=where, prompt_token_ids=tokens, sampling=Sampling(max_new_tokens=1)
        )
        check_request(
            request,
            context_length=limits.context_length,
            vocabulary_size=limits.vocabulary_size,
        )
    except PromptError as error:
        return str(error).removeprefix("request ")
    return ""
