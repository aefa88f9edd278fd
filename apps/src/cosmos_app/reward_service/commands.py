"""``cosmos-app reward-service``."""

import asyncio
import signal
from pathlib import Path

import click

from cosmos_app.guarded import guarded
from cosmos_app.parent import die_with_parent


@click.command("reward-service")
@click.argument("rewards", nargs=-1, required=True, metavar="NAME[=DIRECTORY|=module:function]...")
@click.option(
    "--listen", default="127.0.0.1:0", show_default=True, help="HOST:PORT; port 0 for a free one."
)
@click.option("--capacity", default=64, show_default=True, help="Requests that wait per reward.")
@click.option("--deadline-s", default=600.0, show_default=True, help="For scoring one request.")
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="First line; else REMOTE_REWARD_TOKEN."
)
@click.option(
    "--latent-vae",
    type=click.Path(path_type=Path),
    help="Directory of an AutoencoderKLWan that decodes latents; without it they are refused.",
)
@click.option(
    "--not-ready-status",
    type=click.Choice(["202", "400"]),
    default="202",
    show_default=True,
    help="Answer to a fetch that comes too early; older clients know 400.",
)
@click.option("--child", "is_child", is_flag=True, hidden=True, help="Ends with its parent.")
def reward_service(  # noqa: PLR0913 - one for each option
    rewards: tuple[str, ...],
    *,
    listen: str,
    capacity: int,
    deadline_s: float,
    token_file: Path | None,
    latent_vae: Path | None,
    not_ready_status: str,
    is_child: bool,
) -> None:
    """Score pictures and videos over HTTP, each reward in a process of its own.

    REWARDS are built in (brightness, shapes, prompt_colour, ...), models in a local directory
    (pickscore, hpsv2, hpsv3, image_reward, ocr, gen_eval, video_align, cosmos_reason1), a judge at
    an OpenAI-style address (judge=http://host:8000/v1), or your own functions from a RewardRequest
    to lists of scores. Prints what clients need in their environment;
    without a token it makes one. Ends with Ctrl-C.
    """
    if is_child:
        die_with_parent(signal.SIGKILL)  # before anything that takes time

    from cosmos_app.wfm.reward_service.config import RewardServerConfig
    from cosmos_app.wfm.reward_service.serving import (
        parse_address,
        parse_rewards,
        serve_rewards,
        service_token,
    )

    def start() -> int:
        host, port = parse_address(listen)
        config = RewardServerConfig(
            rewards=parse_rewards(rewards),
            host=host,
            port=port,
            capacity=capacity,
            deadline_s=deadline_s,
            latent_vae=str(latent_vae or ""),
            not_ready_status=400 if not_ready_status == "400" else 202,
        )
        token, is_new = service_token(token_file)
        return asyncio.run(serve_rewards(config, token, is_new_token=is_new))

    guarded(start)
