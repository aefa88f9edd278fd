"""Serving the rewards of a recipe until a signal ends it: its pool, what is said, the loop."""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from cosmos_app.errors import DataError
from cosmos_app.http_serving import http_server
from cosmos_app.listening import exposure, reachable_url
from cosmos_app.recipe import Recipe
from cosmos_app.recipes import load_any_recipe
from cosmos_app.reward_service.api import ROUTE, make_app
from cosmos_rollout import RewardPoolConfig
from cosmos_wfm import DiffusionRlConfig

_GRACE_S = 1
_SLACK_S = 5.0


def rewards_of(recipe: Path, overrides: Sequence[str]) -> RewardPoolConfig:
    """Return the table ``[reward]`` of a recipe, which may have no other one.

    Raises:
        ConfigError: if the file or an override is not a recipe.
        DataError: if it is one of runs that have no such table.
    """
    parsed = load_any_recipe(recipe, overrides)
    if isinstance(parsed, Recipe):
        return parsed.reward
    if isinstance(parsed, DiffusionRlConfig):
        raise DataError(
            f"{recipe} is of a world model, whose rewards are given by name: cosmos-app "
            f"reward-service {' '.join(parsed.rewards)}; NAME=DIRECTORY if it is a model"
        )
    raise DataError(f"{recipe} is of kind {parsed.kind!r}: such runs have no rewards to serve")


async def serve_pool(
    rewards: RewardPoolConfig, taken: socket.socket, token: str, started: Callable[[], None]
) -> int:
    """Serve until a signal; return 0.

    Args:
        rewards: what is computed, and how.
        taken: a listening socket; who asks before the workers have begun waits for them.
        token: what clients have to show.
        started: called once, when the workers have begun.

    Raises:
        RewardError: if a reward cannot be used.
    """
    pool = rewards.build()
    try:
        await pool.start()
        started()
        weights = {reward.name: reward.weight for reward in rewards.rewards}
        app = make_app(pool, weights, token)
        # a pool that is closed answers all at once, so that nobody is waited for
        await http_server(app, grace_s=_GRACE_S, before_end=pool.aclose).serve(sockets=[taken])
    except BaseException:
        await pool.aclose()
        raise
    return 0


def say_how_to_ask(
    rewards: RewardPoolConfig, taken: socket.socket, *, key_file: Path | None, new_token: str
) -> None:
    """Print what is served, where, the token if it is a new one, and the settings of a run.

    Args:
        rewards: that are served.
        taken: where.
        key_file: that holds the token; ``None`` if none is known.
        new_token: the token; empty if its owner has it.
    """
    url = f"{reachable_url(taken)}{ROUTE}"
    names = ", ".join(reward.name for reward in rewards.rewards)
    click.echo(
        f"rewards: {names}, by {rewards.num_workers} processes, {rewards.timeout_s:g} s each"
    )
    click.echo(f"url: {url}")
    if new_token:
        click.echo(f"token: {new_token}")
    where = "" if key_file else " (KEY_FILE: a file that holds the token)"
    click.echo(f"settings of a run{where}: {' '.join(_settings(rewards, url, key_file))}")
    if told := exposure(taken.getsockname()[0]):
        click.echo(told, err=True)
    if rewards.group_rewards:
        left = ", ".join(reward.name for reward in rewards.group_rewards)
        click.echo(f"left to the run, as they need all samples of a prompt: {left}", err=True)


def _settings(rewards: RewardPoolConfig, url: str, key_file: Path | None) -> list[str]:
    """Return the overrides of a run; a sample may have to wait for another one that hangs."""
    wait_s = 2 * rewards.timeout_s + _SLACK_S
    key = key_file.resolve() if key_file else "KEY_FILE"
    service = f'{{kind="service", url="{url}", key_file="{key}", timeout_s={wait_s:g}}}'
    settings = [f"'reward.rewards=[{service}]'", f"reward.timeout_s={wait_s + _SLACK_S:g}"]
    return [*settings, "'reward.sets={}'"] if rewards.sets else settings
