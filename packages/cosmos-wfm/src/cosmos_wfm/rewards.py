"""Rewards of pictures and videos that need no download: pixels and prompts in, numbers out."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.reward_client import RewardServiceConfig
from cosmos_wfm.sample_rewards import SampleRewards, SampleScorer
from cosmos_wfm.scenes import (
    COLOURS,
    Scene,
    SeenShape,
    coloured,
    counted,
    find_shapes,
    placed,
    present,
    read_scene,
)

Pixels = Float[Tensor, "3 F H W"]
Reward = Callable[[Pixels, str], float]
"""From the pixels of one sample in [0, 1], an image being one frame, and its prompt."""

_JPEG_QUALITY = 95
_SOFTNESS = 0.1


def brightness(pixels: Pixels, prompt: str) -> float:
    """Return the mean of all pixels and channels, 0 to 1."""
    return float(pixels.mean())


def compressibility(pixels: Pixels, prompt: str) -> float:
    """Return minus the mean size of a frame as JPEG, in kilobytes."""
    return -sum(_jpeg_bytes(frame) for frame in pixels.unbind(1)) / pixels.shape[1] / 1000.0


def incompressibility(pixels: Pixels, prompt: str) -> float:
    """Return the mean size of a frame as JPEG, in kilobytes."""
    return -compressibility(pixels, prompt)


def sharpness(pixels: Pixels, prompt: str) -> float:
    """Return the mean squared Laplacian of the grey picture: 0 for a flat one."""
    grey = pixels.mean(0)
    inner = grey[:, 1:-1, 1:-1]
    around = grey[:, :-2, 1:-1] + grey[:, 2:, 1:-1] + grey[:, 1:-1, :-2] + grey[:, 1:-1, 2:]
    return float((around - 4.0 * inner).square().mean())


def motion(pixels: Pixels, prompt: str) -> float:
    """Return the mean absolute change from frame to frame; 0 for an image."""
    if pixels.shape[1] == 1:
        return 0.0
    return float((pixels[:, 1:] - pixels[:, :-1]).abs().mean())


def flicker(pixels: Pixels, prompt: str) -> float:
    """Return minus the mean absolute *second* difference over frames: 0 for even motion."""
    if pixels.shape[1] < 3:
        return 0.0
    return -float((pixels[:, 2:] - 2.0 * pixels[:, 1:-1] + pixels[:, :-2]).abs().mean())


def prompt_colour(pixels: Pixels, prompt: str) -> float:
    """Return how much the middle half has the colour that the prompt names first, 0 to 1.

    It is a softmax over minus the squared distances of its mean to all named colours.

    Raises:
        WfmConfigError: if the prompt names none.
    """
    wanted = _named_colour(prompt)
    height, width = pixels.shape[-2:]
    middle = pixels[..., height // 4 : -(height // 4), width // 4 : -(width // 4)]
    mean = middle.mean(dim=(1, 2, 3))
    distances = {
        name: float((mean - torch.tensor(colour)).square().sum())
        for name, colour in COLOURS.items()
    }
    scores = {name: math.exp(-distance / _SOFTNESS) for name, distance in distances.items()}
    return scores[wanted] / max(sum(scores.values()), 1e-12)


def shape(pixels: Pixels, prompt: str) -> float:
    """Return the share of the shapes which the prompt names that are there, 0 to 1.

    For this and the following: ``scenes`` says how shapes are found; videos are averaged over
    frames; a prompt that names no shape is a WfmConfigError.
    """
    return _over_frames(pixels, prompt, present)


def shape_colour(pixels: Pixels, prompt: str) -> float:
    """Return the share of the prompt's coloured shapes that are there in their colour, 0 to 1."""
    return _over_frames(pixels, prompt, coloured)


def shape_count(pixels: Pixels, prompt: str) -> float:
    """Return how near the numbers of shapes are to the prompt's, 0 to 1."""
    return _over_frames(pixels, prompt, counted)


def shape_position(pixels: Pixels, prompt: str) -> float:
    """Return whether shapes are left of, right of, above or below each other as asked, 0 or 1."""
    return _over_frames(pixels, prompt, placed)


def shapes(pixels: Pixels, prompt: str) -> float:
    """Return the mean of shape, colour, count and position, 0 to 1."""
    parts = (shape, shape_colour, shape_count, shape_position)
    return sum(part(pixels, prompt) for part in parts) / len(parts)


def shapes_strict(pixels: Pixels, prompt: str) -> float:
    """Return 1 if everything is as the prompt asks, else 0: GenEval's own measure."""
    return float(shapes(pixels, prompt) == 1.0)


REWARDS: Mapping[str, Reward] = {
    "brightness": brightness,
    "compressibility": compressibility,
    "flicker": flicker,
    "incompressibility": incompressibility,
    "motion": motion,
    "prompt_colour": prompt_colour,
    "shape": shape,
    "shape_colour": shape_colour,
    "shape_count": shape_count,
    "shape_position": shape_position,
    "shapes": shapes,
    "shapes_strict": shapes_strict,
    "sharpness": sharpness,
}
"""Name in a recipe to reward."""


_SCENE_REWARDS = frozenset(
    {"shape", "shape_colour", "shape_count", "shape_position", "shapes", "shapes_strict"}
)


def check_prompts(weights: Mapping[str, float], prompts: Sequence[str]) -> None:
    """Refuse prompts that a reward could not be computed for, before one of them is drawn.

    Args:
        weights: name of a reward of this package to its weight.
        prompts: of a run.

    Raises:
        WfmConfigError: if a prompt does not say what a reward looks for.
    """
    for prompt in prompts:
        if "prompt_colour" in weights:
            _named_colour(prompt)
        if _SCENE_REWARDS & weights.keys():
            read_scene(prompt)


def check_rewards(weights: Mapping[str, float], service: RewardServiceConfig | None) -> None:
    """Refuse weights that make no sum, and rewards that nobody computes.

    Args:
        weights: name of a reward to its weight; empty where the scores come from elsewhere.
        service: who computes them; ``None`` for this process.

    Raises:
        WfmConfigError: names the reward.
    """
    for name, weight in weights.items():
        if not math.isfinite(weight):
            raise WfmConfigError(f"rewards: {name} has the weight {weight}; it must be finite")
    if weights and not any(weights.values()):
        raise WfmConfigError(f"rewards: {', '.join(weights)}: every weight is 0")
    if service is None:
        if weights:
            weighted_reward(weights)
        return
    if unknown := sorted(service.score_keys.keys() - weights.keys()):
        raise WfmConfigError(
            f"reward_service: score_keys names {', '.join(unknown)}; rewards are "
            f"{', '.join(weights)}"
        )


def weighted_reward(weights: Mapping[str, float]) -> Callable[[Tensor, Sequence[str]], list[float]]:
    """Return a function from pixels [B, 3, (F,) H, W] in [-1, 1] and prompts to weighted sums.

    Args:
        weights: name of a reward to its weight.

    Raises:
        WfmConfigError: if a name is unknown or there is none.
    """
    unknown = sorted(weights.keys() - REWARDS.keys())
    if unknown or not weights:
        raise WfmConfigError(
            f"reward: {', '.join(unknown) or 'nothing'} is no reward; there are "
            f"{', '.join(sorted(REWARDS))}; one of your own is what a reward service has "
            "(reward_service; cosmos-app reward-service NAME=module:function), or in Python "
            "rewards={} and train_rl(scorer=...)"
        )

    def score(pixels: Tensor, prompts: Sequence[str]) -> list[float]:
        unit = (pixels.float().cpu() * 0.5 + 0.5).clamp(0.0, 1.0)
        videos = unit if unit.dim() == 5 else unit.unsqueeze(2)
        return [
            sum(weight * REWARDS[name](video, prompt) for name, weight in weights.items())
            for video, prompt in zip(videos, prompts, strict=True)
        ]

    return score


def local_scorer(
    weights: Mapping[str, float],
) -> Callable[[Tensor, Sequence[str]], "Future[list[float]]"]:
    """Return ``weighted_reward(weights)`` as what a rollout asks: its answer is there at once.

    Raises:
        WfmConfigError: if a name is unknown or there is none.
    """
    reward = weighted_reward(weights)

    def score(pixels: Tensor, prompts: Sequence[str]) -> "Future[list[float]]":
        done: Future[list[float]] = Future()
        done.set_result(reward(pixels, prompts))
        return done

    return score


def local_sample_scorer(weights: Mapping[str, float]) -> SampleScorer:
    """Return what rewards samples one by one in this process, each reward by itself.

    A reward that the prompt says nothing for is none of that sample's, and has not failed.

    Args:
        weights: name of a reward of this package to its weight.

    Raises:
        WfmConfigError: if a name is unknown or there is none.
    """
    weighted_reward(weights)  # which looks at the names

    def score(pixels: Tensor, prompt: str) -> "Future[SampleRewards]":
        unit = (pixels.float().cpu() * 0.5 + 0.5).clamp(0.0, 1.0)
        video = unit if unit.dim() == 4 else unit.unsqueeze(1)
        found: dict[str, float] = {}
        problems: list[str] = []
        for name in weights:
            try:
                value = REWARDS[name](video, prompt)
            except WfmConfigError:
                continue  # a prompt may name no colour
            except (ArithmeticError, RuntimeError, ValueError) as error:
                problems.append(f"{name}: {type(error).__name__}: {error}")
                continue
            if math.isfinite(value):
                found[name] = value
            else:
                problems.append(f"{name}: {value}")
        is_whole = found.keys() == weights.keys()
        total = sum(weights[name] * found[name] for name in weights) if is_whole else None
        done: Future[SampleRewards] = Future()
        done.set_result(SampleRewards(rewards=found, reward=total, problems=tuple(problems)))
        return done

    return score


def _named_colour(prompt: str) -> str:
    """Return the first colour that a prompt names."""
    words = re.findall(r"[a-z]+", prompt.lower())
    wanted = next((word for word in words if word in COLOURS), None)
    if wanted is None:
        raise WfmConfigError(f"reward: {prompt!r} names none of {', '.join(COLOURS)}")
    return wanted


def _over_frames(
    pixels: Pixels, prompt: str, measure: Callable[[Scene, Sequence[SeenShape]], float]
) -> float:
    scene = read_scene(prompt)
    return sum(measure(scene, find_shapes(f)) for f in pixels.unbind(1)) / pixels.shape[1]


def _jpeg_bytes(frame: Float[Tensor, "3 H W"]) -> int:
    array = (frame.permute(1, 2, 0).cpu().numpy() * 255.0).round().astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format="JPEG", quality=_JPEG_QUALITY)
    return buffer.tell()
