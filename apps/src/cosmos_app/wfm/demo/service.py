"""A reward service for the length of a block, as a process of its own."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cosmos_app.errors import ChildFailedError
from cosmos_app.parent import as_parent
from cosmos_wfm import DiffusionRlConfig, RewardClient, RewardServiceConfig

_START_S = 300.0
_END_S = 10.0
_LOOK_S = 0.05


@contextmanager
def reward_service(rewards: Sequence[str], log: Path) -> Generator[tuple[RewardServiceConfig, str]]:
    """Start ``cosmos-app reward-service``; give its addresses and token; end it.

    Args:
        rewards: as on its command line.
        log: where its output goes.

    Raises:
        ChildFailedError: if it does not come up.
    """
    token = secrets.token_urlsafe(24)
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "cosmos_app", "reward-service", "--child", *rewards],
            env={**os.environ, **as_parent(), "REMOTE_REWARD_TOKEN": token},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield _addresses(process, log), token
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def client_of(recipe: DiffusionRlConfig, service: tuple[RewardServiceConfig, str]) -> RewardClient:
    """Return a recipe's client of a service that ``reward_service`` gave."""
    addresses, token = service
    config = replace(
        recipe.reward_service or RewardServiceConfig(),
        enqueue_url=addresses.enqueue_url,
        fetch_url=addresses.fetch_url,
    )
    return RewardClient(config, recipe.rewards, token=token)


def _addresses(process: subprocess.Popen[bytes], log: Path) -> RewardServiceConfig:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        told = dict(
            line.removeprefix("export ").split("=", 1)
            for line in log.read_text(encoding="utf-8").splitlines()
            if line.startswith("export ")
        )
        if "REMOTE_REWARD_FETCH_URL" in told:
            return RewardServiceConfig(
                enqueue_url=told["REMOTE_REWARD_ENQUEUE_URL"],
                fetch_url=told["REMOTE_REWARD_FETCH_URL"],
            )
        time.sleep(_LOOK_S)
    raise ChildFailedError(
        f"the reward service did not come up: {log.read_text(encoding='utf-8')[-2000:]}"
    )
