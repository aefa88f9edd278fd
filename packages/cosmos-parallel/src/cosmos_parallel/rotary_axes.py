"""Positions of models that turn by time, height and width, with samples that share a row.

Such a decoder tells samples of a row apart by a fourth, first axis only: positions of text alone,
which other models take, leave it blind to where a sample begins.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

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
