"""Serving rewards until a signal ends it: the token, the port, the processes, the loop."""

import asyncio
import os
import secrets
import socket
from pathlib import Path

import click

from cosmos_app.errors import DashboardAddressError, DataError
from cosmos_app.http_serving import http_server
from cosmos_app.listening import exposure, http_url
from cosmos_app.wfm.reward_service.api import make_app
from cosmos_app.wfm.reward_service.config import RewardServerConfig
from cosmos_app.wfm.reward_service.processes import ScoringProcess
from cosmos_app.wfm.reward_service.queue import RewardQueue
from cosmos_app.wfm.reward_service.rewards import check_reward
from cosmos_core.addresses import listen_on

_TOKEN_BYTES = 24
_LEAST_TOKEN = 16
TOKEN_NAMES = ("REMOTE_REWARD_TOKEN", "WFM_REWARD_TOKEN")


def parse_rewards(named: tuple[str, ...]) -> dict[str, str]:
    """Return name and ``module:function`` of each reward of a command line.

    Raises:
        DataError: if there is none, or one cannot be found.
    """
    rewards = {name: spec for name, _, spec in (each.partition("=") for each in named)}
    for name, spec in rewards.items():
        check_reward(name, spec)
    return rewards


def parse_address(listen: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``.

    Raises:
        DataError: if it is none.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise DataError(f"--listen {listen}: want HOST:PORT, such as 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def service_token(token_file: Path | None) -> tuple[str, bool]:
    """Return the token, from a file, the environment or anew, and whether it is a new one.

    Raises:
        DataError: if the file cannot be read, or the token is too short to be a secret.
    """
    found = next((os.environ[name] for name in TOKEN_NAMES if os.environ.get(name)), "")
    if token_file is not None:
        try:
            found = token_file.read_text(encoding="utf-8").partition("\n")[0].strip()
        except OSError as error:
            raise DataError(f"{token_file} cannot be read: {error}") from error
    elif not found:
        return secrets.token_urlsafe(_TOKEN_BYTES), True
    if len(found) < _LEAST_TOKEN or not found.isascii() or not found.isprintable():
        raise DataError(f"a token has to be {_LEAST_TOKEN} or more printable ASCII characters")
    return found, False


async def serve_rewards(config: RewardServerConfig, token: str, *, is_new_token: bool) -> int:
    """Serve until a signal; return 0. What a client needs is printed when all rewards are loaded.

    Raises:
        DashboardAddressError: if the port cannot be had.
        ScoringProcessError: if a reward cannot be loaded.
    """
    taken = _listen(config)
    processes = [
        ScoringProcess(name, named, deadline_s=config.deadline_s, latent_vae=config.latent_vae)
        for name, named in config.rewards.items()
    ]
    queue = RewardQueue(processes, capacity=config.capacity, keep_s=config.keep_s)
    working: asyncio.Task[None] | None = None
    try:
        await asyncio.gather(*(process.start() for process in processes))
        working = asyncio.create_task(queue.work())
        for line in _told(taken, config, token if is_new_token else ""):
            click.echo(line)
        if told := exposure(config.host):
            click.echo(told, err=True)
        server = http_server(make_app(queue, config, token), grace_s=2)
        await server.serve(sockets=[taken])
    finally:
        if working is not None:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        await asyncio.gather(*(process.close() for process in processes))
        taken.close()
    return 0


def _listen(config: RewardServerConfig) -> socket.socket:
    try:
        return listen_on(config.host, config.port)
    except OSError as error:
        raise DashboardAddressError(
            f"reward-service: cannot listen on {config.host} port {config.port} "
            f"({error.strerror or error}); choose another with --listen, or port 0 for any free one"
        ) from error


def _told(taken: socket.socket, config: RewardServerConfig, new_token: str) -> list[str]:
    url = http_url(taken)
    lines = [
        f"rewards: {', '.join(config.rewards)}",
        f"export REMOTE_REWARD_ENQUEUE_URL={url}/enqueue",
        f"export REMOTE_REWARD_FETCH_URL={url}/pull",
    ]
    return [*lines, f"export REMOTE_REWARD_TOKEN={new_token}"] if new_token else lines
