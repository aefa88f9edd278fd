"""The client of a recipe's reward service: its addresses and token come from the environment."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from cosmos_app.errors import DataError
from cosmos_app.wfm.recipe import WfmRecipe
from cosmos_wfm import (
    DiffusionRlConfig,
    EnqueueTimeout,
    RewardClient,
    RewardServiceConfig,
    SampleScorer,
)

_PREFIXES = ("REMOTE_REWARD_", "WFM_REWARD_")
_TIMEOUTS = {
    "CONNECT_TIMEOUT_S": "connect_s",
    "TIMEOUT_BASE_S": "base_s",
    "TIMEOUT_PER_MB_S": "per_mib_s",
    "TIMEOUT_MIN_S": "min_s",
    "TIMEOUT_MAX_S": "max_s",
}


@contextmanager
def reward_client(
    recipe: DiffusionRlConfig, *, patience_s: float | None = None
) -> Generator[RewardClient | None]:
    """Give the client of the service that a recipe names; ``None`` if it names none.

    Args:
        recipe: of the run.
        patience_s: how long the service may take to be there; ``None`` for as long as the recipe
            lets it take to connect.

    Raises:
        DataError: if an address or the token is nowhere to be found, or a timeout is no number.
        RewardServiceError: if the service does not answer, or refuses the token.
    """
    if recipe.reward_service is None:
        yield None
        return
    with _client(recipe.reward_service, recipe.rewards) as client:
        if patience_s is None:
            service = recipe.reward_service
            patience_s = min(service.enqueue_timeout.connect_s, service.deadline_s)
        client.wait_until_there(patience_s)
        yield client


@contextmanager
def validation_scorer(recipe: WfmRecipe, *, draws: bool) -> Generator[SampleScorer | None]:
    """Give what asks a service for the rewards of validation samples, if that is a recipe's way.

    Args:
        recipe: of the run.
        draws: whether the run has a client of its own service already, as it draws samples itself.

    Raises:
        DataError: as ``reward_client``.
    """
    validation = recipe.validation
    if validation is None:
        yield None
        return
    service, weights = validation.reward_service, validation.rewards
    if not weights and isinstance(recipe, DiffusionRlConfig) and not draws:
        service, weights = recipe.reward_service, recipe.rewards
    if service is None:
        yield None
        return
    with _client(service, weights) as client:
        yield client.sample_scorer(validation.deadline_s)


def _client(service: RewardServiceConfig, weights: Mapping[str, float]) -> RewardClient:
    config = complete(service, os.environ)
    return RewardClient(config, weights, token=_wanted("TOKEN", os.environ))


def complete(config: RewardServiceConfig, environment: Mapping[str, str]) -> RewardServiceConfig:
    """Fill in what a recipe leaves to the environment.

    ``REMOTE_REWARD_ENQUEUE_URL`` and ``_FETCH_URL``, or the older ``WFM_REWARD_*``;
    ``REMOTE_REWARD_ENQUEUE_TIMEOUT_{BASE_S,PER_MB_S,MIN_S,MAX_S}`` (or ``_TIMEOUT_S`` for both
    bounds) and ``_CONNECT_TIMEOUT_S``; ``COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA=1``.

    Raises:
        DataError: if an address is nowhere to be found, or a timeout is no number.
    """
    return replace(
        config,
        enqueue_url=config.enqueue_url or _wanted("ENQUEUE_URL", environment),
        fetch_url=config.fetch_url or _wanted("FETCH_URL", environment),
        pin_replica=config.pin_replica
        and environment.get("COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA") != "1",
        enqueue_timeout=_timeout(config.enqueue_timeout, environment),
    )


def _timeout(timeout: EnqueueTimeout, environment: Mapping[str, str]) -> EnqueueTimeout:
    changes: dict[str, float] = {}
    fixed = _found("ENQUEUE_TIMEOUT_S", environment)
    if fixed:
        changes = dict.fromkeys(("min_s", "max_s"), _number("ENQUEUE_TIMEOUT_S", fixed))
    for name, field in _TIMEOUTS.items():
        if text := _found(f"ENQUEUE_{name}", environment):
            changes[field] = _number(f"ENQUEUE_{name}", text)
    return replace(timeout, **changes)


def _found(name: str, environment: Mapping[str, str]) -> str:
    return next((environment[p + name] for p in _PREFIXES if environment.get(p + name)), "")


def _wanted(name: str, environment: Mapping[str, str]) -> str:
    found = _found(name, environment)
    if not found:
        raise DataError(
            f"the recipe has a reward_service, but {_PREFIXES[0]}{name} is not set; "
            "'cosmos-app reward-service' prints what to set"
        )
    return found


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise DataError(f"{_PREFIXES[0]}{name} is {text!r}, no number of seconds") from error
