"""The engine that a run starts, and what one that does not start wants, in the recipe's words."""

import contextlib
from collections.abc import Generator
from dataclasses import replace
from typing import TypeVar

from cosmos_app.prepare import RunFiles
from cosmos_app.prompt_rows import most_videos
from cosmos_rollout import EngineConfig, EngineStartError, VLLMConfig

EngineT = TypeVar("EngineT", bound=EngineConfig)


def engine_that_shows(engine: EngineT, files: RunFiles) -> EngineT:
    """Return an engine with room for as many videos as a row of the run has."""
    if not isinstance(engine, VLLMConfig):
        return engine
    most = max(*map(most_videos, files.with_rows), engine.videos_per_prompt)
    return replace(engine, videos_per_prompt=most)


@contextlib.contextmanager
def naming_its_keys(section: str) -> Generator[None]:
    """Say where in the recipe the settings are that an engine's error names.

    Raises:
        EngineStartError: of the same kind as the one inside.
    """
    try:
        yield
    except EngineStartError as error:
        raise type(error)(f"[{section}] {error}") from error
