"""A Qwen2-VL or Qwen2.5-VL that is shown a picture or video and one question about it.

The tokens of vision are cut and put in order here, as the processors of transformers do it, whose
one for videos needs torchvision.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.model_rewards.pictures import from_directory, normalised, resized
from cosmos_wfm.reward_wire import RewardRequest

HEAD_FILE = "head.safetensors"
SETTINGS_FILE = "reward.json"
_MOST_PIXELS = 448 * 448
_FEWEST_PIXELS = 56 * 56
_MOST_FRAMES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSettings:
    """What ``reward.json`` beside a model says; a checkpoint is asked as it was trained.

    Attributes:
        instruction: the question; ``{prompt}`` stands for the sample's prompt.
        means: name of a score to what is subtracted from it.
        deviations: name of a score to what it is divided by then.
    """

    instruction: str
    means: Mapping[str, float]
    deviations: Mapping[str, float]


def read_settings(directory: str, instruction: str) -> RewardSettings:
    """Return the settings of a model, with this instruction if it has none of its own.

    Raises:
        WfmConfigError: if there is a file that cannot be read.
    """
    file = Path(directory) / SETTINGS_FILE
    try:
        told: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    except ValueError as error:
        raise WfmConfigError(f"{file} is no JSON: {error}") from error
    return RewardSettings(
        instruction=told.get("instruction", instruction),
        means=told.get("means", {}),
        deviations=told.get("deviations", {}),
    )


class QwenVision:
    """Model and tokenizer of a directory."""

    def __init__(self, model_class: Any, directory: str, reward: str) -> None:
        """Load both.

        Args:
            model_class: of transformers, with a language head.
            directory: where they are.
            reward: what errors are about.

        Raises:
            WfmConfigError: if one cannot be loaded.
        """
        self.model = from_directory(model_class, directory, reward)
        self.tokenizer = from_directory(AutoTokenizer, directory, reward)

    def token(self, text: str) -> int:
        """Return the number of a text that is one token.

        Raises:
            WfmConfigError: if it is not.
        """
        numbers: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(numbers) != 1:
            raise WfmConfigError(f"{text!r} is no single token of this model: {numbers}")
        return numbers[0]

    def asked(self, frames: Float[Tensor, "F 3 H W"], question: str) -> dict[str, Tensor]:
        """Return what the model is called with: a chat of one message, before its answer.

        Args:
            frames: in [0, 1]; one is a picture.
            question: behind them.
        """
        vision = self.model.config.vision_config
        patches, grid = vision_patches(
            evenly(frames, _MOST_FRAMES),
            patch=vision.patch_size,
            merge=vision.spatial_merge_size,
            temporal=vision.temporal_patch_size,
        )
        kind = "video" if len(frames) > 1 else "image"
        num = int(grid.prod()) // vision.spatial_merge_size**2
        text = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            f"<|vision_start|>{f'<|{kind}_pad|>' * num}<|vision_end|>{question}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        tokens = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        is_vision = tokens == self.token(f"<|{kind}_pad|>")
        names = ("pixel_values_videos", "video_grid_thw")
        if kind == "image":
            names = ("pixel_values", "image_grid_thw")
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "mm_token_type_ids": is_vision.int() * (2 if kind == "video" else 1),
            names[0]: patches,
            names[1]: grid[None],
        }


class TokenRewards:
    """Scores at special tokens of a question: a head over the last hidden state of each."""

    def __init__(self, model_class: Any, directory: str, reward: str, head: nn.Module) -> None:
        """Load model, tokenizer and the weights of the head.

        Args:
            model_class: of transformers.
            directory: where they are; the head's in ``head.safetensors``, by its own names.
            reward: what errors are about.
            head: from a hidden state to scores.

        Raises:
            WfmConfigError: if something cannot be loaded.
        """
        self._qwen = QwenVision(model_class, directory, reward)
        self._head = head.eval()
        try:
            self._head.load_state_dict(load_file(Path(directory) / HEAD_FILE))
        except (OSError, RuntimeError) as error:
            raise WfmConfigError(f"{reward}: {directory}/{HEAD_FILE}: {error}") from error

    @torch.no_grad()
    def scores(
        self, frames: Float[Tensor, "F 3 H W"], question: str, special: tuple[str, ...]
    ) -> list[Float[Tensor, " S"]]:
        """Return the head's output at each of these tokens.

        Raises:
            WfmConfigError: if one is not in the question once.
        """
        inputs = self._qwen.asked(frames, question)
        hidden = self._qwen.model.model(**inputs).last_hidden_state[0]
        found: list[Tensor] = []
        for text in special:
            places = (inputs["input_ids"][0] == self._qwen.token(text)).nonzero().flatten()
            if len(places) != 1:
                raise WfmConfigError(f"{text} is {len(places)} times in the instruction; want once")
            found.append(self._head(hidden[places[0]]))
        return found


def hidden_width(directory: str) -> int:
    """Return the width of a model's hidden states.

    Raises:
        WfmConfigError: if the directory has no readable ``config.json``.
    """
    try:
        config = json.loads((Path(directory) / "config.json").read_text("utf-8"))
        return int(config.get("text_config", config)["hidden_size"])
    except (OSError, ValueError, KeyError) as error:
        raise WfmConfigError(f"{directory}/config.json names no hidden_size: {error!r}") from error


def samples_of(request: RewardRequest) -> list[tuple[Float[Tensor, "F 3 H W"], str]]:
    """Return the frames of each sample, in [0, 1], and its prompt."""
    frames = request.pixels().permute(0, 2, 1, 3, 4)
    return list(zip(frames, request.prompts, strict=True))


def evenly(frames: Float[Tensor, "F 3 H W"], most: int) -> Float[Tensor, "f 3 H W"]:
    """Return at most this many frames, from the first to the last."""
    if len(frames) <= most:
        return frames
    return frames[torch.linspace(0, len(frames) - 1, most).round().long()]


def vision_patches(
    frames: Float[Tensor, "F 3 H W"], *, patch: int, merge: int, temporal: int
) -> tuple[Float[Tensor, "N P"], Tensor]:
    """Return patches in the model's order, and their grid (frames, rows, columns).

    The last frame is repeated until ``temporal`` divides them; height and width become the nearest
    multiples of ``patch · merge``, within a number of pixels.
    """
    height, width = _nearest_size(frames.shape[-2], frames.shape[-1], patch * merge)
    pixels = normalised(resized(frames, height, width))
    missing = -len(pixels) % temporal
    pixels = torch.cat([pixels, pixels[-1:].expand(missing, -1, -1, -1)])
    grid = (len(pixels) // temporal, height // patch, width // patch)
    cut = pixels.reshape(
        grid[0], temporal, 3, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch
    )
    # to frames, coarse rows and columns, fine ones, then what is within a patch
    ordered = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return ordered.reshape(math.prod(grid), -1), torch.tensor(grid)


def _nearest_size(height: int, width: int, factor: int) -> tuple[int, int]:
    scale = 1.0
    if height * width > _MOST_PIXELS:
        scale = math.sqrt(_MOST_PIXELS / (height * width))
    elif height * width < _FEWEST_PIXELS:
        scale = math.sqrt(_FEWEST_PIXELS / (height * width))
    rows, columns = (max(1, round(side * scale / factor)) for side in (height, width))
    return rows * factor, columns * factor
