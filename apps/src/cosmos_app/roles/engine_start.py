"""What an engine that does not start is said to want, in the recipe's words."""

import contextlib
from collections.abc import Generator

from cosmos_rollout import EngineStartError


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
