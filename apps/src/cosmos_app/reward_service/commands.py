"""``cosmos-app reward-service``."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from cosmos_app.guarded import guarded
from cosmos_app.parent import die_with_parent

if TYPE_CHECKING:
    from cosmos_app.wfm.reward_service.config import RewardServerConfig

_LOOPBACK = "127.0.0.1"
_OF_NAMES = ("capacity", "deadline_s", "latent_vae", "not_ready_status")
_EXAMPLES = """
\b
Examples:
  cosmos-app reward-service configs/math.toml reward.num_workers=8 \\
      --listen 0.0.0.0:9000 --token-file judge.key
  cosmos-app run configs/math.toml \\
      'reward.rewards=[{kind="service", url="http://judge:9000/score", key_file="judge.key"}]'
  cosmos-app reward-service prompt_colour pickscore=/models/PickScore_v1

Exit codes: 1 a reward could not be loaded in time, 2 it cannot be used, or an argument or the
recipe is wrong, 130 ended by Ctrl-C.
"""


@click.command("reward-service", epilog=_EXAMPLES)
@click.argument(
    "rewards",
    nargs=-1,
    required=True,
    metavar="{RECIPE.toml [PATH=VALUE]... | NAME[=DIRECTORY|=module:function]...}",
)
@click.option(
    "--listen", default=f"{_LOOPBACK}:0", show_default=True, help="HOST:PORT; 0 for a free port."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), help=f"Shorthand for --listen {_LOOPBACK}:PORT."
)
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="First line; else REMOTE_REWARD_TOKEN."
)
@click.option("--capacity", default=64, show_default=True, help="Requests that wait per NAME.")
@click.option(
    "--deadline-s", default=600.0, show_default=True, help="For scoring one request, of a NAME."
)
@click.option(
    "--latent-vae",
    type=click.Path(path_type=Path),
    help="Directory of an AutoencoderKLWan that decodes latents; without it NAMEs refuse them.",
)
@click.option(
    "--not-ready-status",
    type=click.Choice(["202", "400"]),
    default="202",
    show_default=True,
    help="A NAME's answer to a fetch that comes too early; older clients know 400.",
)
@click.option("--child", "is_child", is_flag=True, hidden=True, help="Ends with its parent.")
@click.pass_context
def reward_service(  # noqa: PLR0913 - one for each option
    context: click.Context,
    rewards: tuple[str, ...],
    *,
    listen: str,
    port: int | None,
    token_file: Path | None,
    capacity: int,
    deadline_s: float,
    latent_vae: Path | None,
    not_ready_status: str,
    is_child: bool,
) -> None:
    """Serve rewards over HTTP, to runs on other machines.

    RECIPE.toml: the rewards of its table [reward], for samples of language models; the file may
    hold nothing else. They are computed by num_workers processes with the table's timeout_s and
    memory_mib: one that raises, hangs or dies costs its sample. The settings by which a run asks
    are printed; group_rewards stay with the run.

    NAME: rewards of pictures and videos, each in a process of its own. They are built in
    (brightness, shapes, prompt_colour, ...), models in a local directory (pickscore, hpsv2, hpsv3,
    image_reward, ocr, gen_eval, video_align, cosmos_reason1), a judge at an OpenAI-style address
    (judge=http://host:8000/v1), or your own functions from a RewardRequest to lists of scores. What
    clients need in their environment is printed.

    Without a token it makes one, which is printed too. Ends with Ctrl-C.
    """
    if is_child:
        die_with_parent(signal.SIGKILL)  # before anything that takes time
    if port is not None:
        if _is_given(context, "listen"):
            raise click.UsageError("--port is short for --listen: give one of them")
        listen = f"{_LOOPBACK}:{port}"
    if _is_recipe(rewards[0]):
        _refuse(context, _OF_NAMES)
        guarded(_of_recipe(Path(rewards[0]), rewards[1:], listen, token_file))

    from cosmos_app.wfm.reward_service.config import RewardServerConfig

    config = RewardServerConfig(
        rewards={},
        capacity=capacity,
        deadline_s=deadline_s,
        latent_vae=str(latent_vae or ""),
        not_ready_status=400 if not_ready_status == "400" else 202,
    )
    guarded(_of_names(rewards, config, listen, token_file))


def _is_given(context: click.Context, option: str) -> bool:
    return context.get_parameter_source(option) is ParameterSource.COMMANDLINE


def _is_recipe(argument: str) -> bool:
    return "=" not in argument and argument.endswith((".toml", ".json"))


def _refuse(context: click.Context, options: Sequence[str]) -> None:
    for option in options:
        if _is_given(context, option):
            raise click.UsageError(
                f"--{option.replace('_', '-')} is for rewards that are given by NAME; limits of a "
                "recipe's are those of its table [reward], as in reward.num_workers=8"
            )


def _of_recipe(
    recipe: Path, overrides: Sequence[str], listen: str, token_file: Path | None
) -> Callable[[], int]:
    """Return what serves the rewards of a recipe; all it needs is imported."""
    from cosmos_app.reward_address import parse_address, service_token, take_address
    from cosmos_app.reward_service.serving import rewards_of, say_how_to_ask, serve_pool

    def start() -> int:
        rewards = rewards_of(recipe, overrides)
        token, is_new = service_token(token_file)
        with take_address(*parse_address(listen)) as taken:

            def say() -> None:
                new_token = token if is_new else ""
                say_how_to_ask(rewards, taken, key_file=token_file, new_token=new_token)

            return asyncio.run(serve_pool(rewards, taken, token, say))

    return start


def _of_names(
    names: tuple[str, ...], config: "RewardServerConfig", listen: str, token_file: Path | None
) -> Callable[[], int]:
    """Return what serves rewards of pictures and videos; all it needs is imported."""
    from cosmos_app.reward_address import parse_address, service_token
    from cosmos_app.wfm.reward_service.serving import parse_rewards, serve_rewards

    def start() -> int:
        host, port = parse_address(listen)
        served = replace(config, rewards=parse_rewards(names), host=host, port=port)
        token, is_new = service_token(token_file)
        return asyncio.run(serve_rewards(served, token, is_new_token=is_new))

    return start
