"""Serving rewards until a signal ends it: the port, the processes, the loop."""

import asyncio
import socket

import click

from cosmos_app.http_serving import http_server
from cosmos_app.listening import exposure, reachable_url
from cosmos_app.reward_address import take_address
from cosmos_app.wfm.reward_service.api import make_app
from cosmos_app.wfm.reward_service.config import RewardServerConfig
from cosmos_app.wfm.reward_service.processes import ScoringProcess
from cosmos_app.wfm.reward_service.queue import RewardQueue
from cosmos_app.wfm.reward_service.rewards import check_reward


def parse_rewards(named: tuple[str, ...]) -> dict[str, str]:
    """Return name and ``module:function`` of each reward of a command line.

    Raises:
        DataError: if there is none, or one cannot be found.
    """
    rewards = {name: spec for name, _, spec in (each.partition("=") for each in named)}
    for name, spec in rewards.items():
        check_reward(name, spec)
    return rewards


async def serve_rewards(config: RewardServerConfig, token: str, *, is_new_token: bool) -> int:
    """Serve until a signal; return 0. What a client needs is printed when all rewards are loaded.

    Raises:
        DashboardAddressError: if the port cannot be had.
        ScoringProcessError: if a reward cannot be loaded.
    """
    taken = take_address(config.host, config.port)
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


def _told(taken: socket.socket, config: RewardServerConfig, new_token: str) -> list[str]:
    url = reachable_url(taken)
    lines = [
        f"rewards: {', '.join(config.rewards)}",
        f"export REMOTE_REWARD_ENQUEUE_URL={url}/enqueue",
        f"export REMOTE_REWARD_FETCH_URL={url}/pull",
    ]
    return [*lines, f"export REMOTE_REWARD_TOKEN={new_token}"] if new_token else lines
