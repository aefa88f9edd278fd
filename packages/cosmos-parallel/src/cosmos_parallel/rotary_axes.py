"""Positions of models that turn by time, height and width, with samples that share a row.

Such a decoder tells samples of a row apart by a fourth, first axis only: positions of text alone,
which other models take, leave it blind to where a sample begins.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROTARY_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
# decoders of text that count tokens, those of pictures among them, and let none see a later one but
# of the same picture, where they are told by kinds of tokens (Gemma 3)
COUNTING_TYPES = frozenset(
    {
        "aya_vision",
        "cohere2_vision",
        "gemma3",
        "idefics3",
        "internvl",
        "llava",
        "llava_next",
        "llava_onevision",
        "mistral3",
        "smolvlm",
        "vipllava",
    }
)
_NUM_AXES = 4


def has_rotary_axes(config: "PretrainedConfig") -> bool:
    """Whether a model's decoder takes positions [4, B, T] for rows of several samples."""
    return config.model_type in ROTARY_TYPES


def sees(config: "PretrainedConfig") -> bool:
    """Whether a model has a part that sees."""
    return getattr(config, "vision_config", None) is not None


class RotaryAxes:
    """Positions by time, height and width of tokens among pictures and videos.

    Those of Qwen2-VL (Wang et al., 2024, section 2.1) and its successors as they were trained, and
    as vLLM has them: what follows a video goes on behind its largest position. transformers 5 goes
    on behind a frame's height and width, though time may be beyond.
    """

    def __init__(self, config: "PretrainedConfig") -> None:
        """Take the config of a model of rotary axes."""
        vision: Any = config.vision_config  # of its own class in each model
        self._merge = int(vision.spatial_merge_size)
        self._per_second = float(getattr(vision, "tokens_per_second", 1.0))
        # each pair of frames stands by itself then, behind its time in words
        self._are_apart = config.model_type.startswith("qwen3")

    def positions(
        self,
        kinds: Tensor,
        *,
        pictures: Sequence[Tensor],
        videos: Sequence[Tensor] = (),
        seconds: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return positions int64[3, B, T].

        Args:
            kinds: int64[B, T], 1 on tokens of pictures, 2 on those of videos, 0 elsewhere.
            pictures: grids int64[N, 3] in time, height and width of pictures, in their order.
            videos: the same of videos.
            seconds: float32[N] from one step of a video's grid to the next, in models that ask.
        """
        steps = iter([float(each) * self._per_second for part in seconds for each in part.tolist()])
        seen = {1: iter(self._grids(pictures)), 2: iter(self._grids(videos, self._are_apart))}
        rows: list[Tensor] = []
        for row in kinds.tolist():
            blocks: list[Tensor] = []
            begin = 0
            for kind, group in groupby(row):
                if kind == 0:
                    block = torch.arange(len(list(group))).expand(3, -1)
                else:
                    step = next(steps, 1.0) if kind == 2 else 1.0
                    block = _of_grid(next(seen[kind]), step)
                blocks.append(block + begin)
                begin = int(blocks[-1].max()) + 1
            rows.append(torch.cat(blocks, dim=1))
        return torch.stack(rows, dim=1).to(kinds.device)

    def _grids(self, given: Sequence[Tensor], are_apart: bool = False) -> list[list[int]]:
        grids = [grid for part in given for grid in part.tolist()]
        if are_apart:
            grids = [[1, h, w] for t, h, w in grids for _ in range(t)]
        return [[t, h // self._merge, w // self._merge] for t, h, w in grids]


def _of_grid(grid: Sequence[int], step: float) -> Tensor:
    """Return positions int64[3, t h w] of a grid whose times are ``step`` apart, rounded down."""
    t, h, w = grid
    times = (torch.arange(t, dtype=torch.float64) * step).long()
    axes = torch.meshgrid(times, torch.arange(h), torch.arange(w), indexing="ij")
    return torch.stack([axis.flatten() for axis in axes])


def whole_axes(positions: Tensor | None, rows: Tensor) -> Tensor:
    """Return positions int64[4, B, T] of what such a decoder is given.

    Args:
        positions: ``[B, T]`` of text, ``[3, B, T]`` of rows of one sample, or ``[4, B, T]``;
            ``None`` for rows of one sample and text alone.
        rows: ``[B, T, ...]``, whose they are.
    """
    count = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape[:2])
    if positions is None or positions.ndim == count.ndim:
        return (count if positions is None else positions).expand(_NUM_AXES, -1, -1)
    return positions if len(positions) == _NUM_AXES else torch.cat([count[None], positions])


def spread_text_positions(model: nn.Module) -> None:
    """Have a model of such a decoder take positions [B, T] of text as every other model does."""
    config: Any = getattr(model, "config", None)  # any Hugging Face configuration
    if config is not None and has_rotary_axes(config):
        model.register_forward_pre_hook(_spread, with_kwargs=True)


def _spread(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs | {"position_ids": spread(kwargs.get("position_ids"))}


def spread(positions: Tensor | None) -> Tensor | None:
    """Return positions as such a decoder takes them; those of text alone, [B, T], for all axes."""
    if positions is None or positions.ndim != 2:
        return positions
    return positions.expand(_NUM_AXES, -1, -1)
