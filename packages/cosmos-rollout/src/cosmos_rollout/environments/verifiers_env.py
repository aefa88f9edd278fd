"""Environments of the `verifiers` library, played with our engine.

They drive the conversation themselves, and ask for chat completions. What is new in each request is
said to our `Chat`, so that their turns are recorded token by token like those of any environment. A
conversation that they rewrite cannot be recorded so; that episode fails.

The library has had two interfaces: up to 0.3 environments are objects with a rubric, since 0.4
tasks that programs (harnesses) work on. There is a module for each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Protocol

from cosmos_rollout.environments import verifiers_env_01, verifiers_env_04
from cosmos_rollout.environments.environment import Environment
from cosmos_rollout.errors import UserCodeError
from cosmos_rollout.prompts import PromptRow

SUPPORTED = "0.1.10 and 0.4"
"""Versions of `verifiers` that there is a module for."""


class EnvironmentWithRows(Environment, Protocol):
    """An environment that brings its own data."""

    def rows(self) -> Sequence[PromptRow]:
        """Return the environment's own data set as prompts.

        Raises:
            RolloutError: if it has none, or none that ends.
        """
        ...


Loader = Callable[[str, Mapping[str, Any]], EnvironmentWithRows]
"""From ``id`` and ``settings`` to an environment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiersEnvironmentConfig:
    """An environment of the `verifiers` library, 0.1.10 or 0.4.

    Attributes:
        kind: selects this environment.
        id: an installed environment or, since 0.4, taskset; or the function that makes the
            environment: ``module:load_environment``, ``path/to/file.py:load_environment``.
        settings: what the loading function is told; of a taskset the table ``env`` of the
            library's own configuration, with ``taskset``, ``agent`` and the like.
    """

    kind: Literal["verifiers"] = "verifiers"
    id: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def build(self) -> EnvironmentWithRows:
        """Load the environment.

        Raises:
            UserCodeError: if the library or the environment is not there, is of another version,
                or is one that cannot be played.
        """
        try:
            found = version("verifiers")
        except PackageNotFoundError:
            found = "none"
        load = loader_for(found)
        if load is None:
            raise UserCodeError(
                f"environment {self.id} cannot be loaded: it needs verifiers {SUPPORTED} (pip "
                f"install 'cosmos-rollout[verifiers]'), and of verifiers {found} is installed"
            )
        return load(self.id, self.settings)


def loader_for(installed: str) -> Loader | None:
    """Return what loads environments of a version of `verifiers`; None if nothing does."""
    numbers = installed.split(".")
    if numbers[:3] == ["0", "1", "10"]:
        return verifiers_env_01.load
    return verifiers_env_04.load if numbers[:2] == ["0", "4"] else None
