"""Positions of models that turn by time, height and width, with samples that share a row.

Such a decoder tells samples of a row apart by a fourth, first axis only: positions of text alone,
which other models take, leave it blind to where a sample begins.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cosmos_parallel.generic_weights import auto_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MODEL_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
_NUM_AXES = 4


def has_rotary_axes(config: "PretrainedConfig") -> bool:
    """Whether a model's decoder takes positions [4, B, T] for rows of several samples."""
    return config.model_type in _MODEL_TYPES


def sees(config: "PretrainedConfig") -> bool:
    """Whether a model has a part that sees."""
    return getattr(config, "vision_config", None) is not None


class RotaryAxes:
    """Positions by time, height and width of tokens among pictures and videos."""

    def __init__(self, config: "PretrainedConfig") -> None:
        """Take the config of a model of rotary axes."""
        self._config = config
        self._model: Any = None  # without weights, built when it is asked first

    def positions(
        self,
        kinds: Tensor,
        *,
        pictures: Sequence[Tensor],
        videos: Sequence[Tensor] = (),
        seconds: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return positions int64[3, B, T] as the model computes them itself.

        Args:
            kinds: int64[B, T], 1 on tokens of pictures, 2 on those of videos, 0 elsewhere.
            pictures: grids int64[N, 3] in time, height and width of pictures, in their order.
            videos: the same of videos.
            seconds: float32[N] from one step of a video's grid to the next, in models that ask.
        """
        if self._model is None:
            with torch.device("meta"):
                model: Any = auto_class(self._config).from_config(self._config)
            self._model = next(part for part in model.modules() if hasattr(part, "get_rope_index"))
        positions, _ = self._model.get_rope_index(
            torch.zeros_like(kinds),  # tokens, whose kinds say enough
            mm_token_type_ids=kinds,
            image_grid_thw=_joined(pictures),
            video_grid_thw=_joined(videos),
            second_per_grid_ts=_joined(seconds),
        )
        return positions


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    return torch.cat(list(parts)) if parts else None


def spread_text_positions(model: nn.Module) -> None:
    """Have a model of such a decoder take positions [B, T] of text as every other model does."""
    config: Any = getattr(model, "config", None)  # any Hugging Face configuration
    if config is not None and has_rotary_axes(config):
        model.register_forward_pre_hook(_spread, with_kwargs=True)


def _spread(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positions: Tensor | None = kwargs.get("position_ids")
    if positions is None or positions.ndim != 2:
        return args, kwargs
    return args, kwargs | {"position_ids": positions.expand(_NUM_AXES, -1, -1)}
