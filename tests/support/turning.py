"""Positions by time, height and width, written down from Qwen2-VL's and Qwen2.5-VL's papers."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np
import torch


def positions_of(kinds: torch.Tensor, pixels: Mapping[str, Any], config: Any) -> torch.Tensor:
    """Return [3, T] positions of a row: text goes on behind the largest position of a video.

    transformers 5 has it go on behind a frame's height and width, though time may be beyond.
    """
    grids: dict[int, Iterator[list[int]]] = {
        1: iter(pixels.get("image_grid_thw", torch.empty(0)).tolist()),
        2: iter(_video_grids(pixels, config)),
    }
    seconds = iter(torch.as_tensor(pixels.get("second_per_grid_ts", [])).tolist())
    found: list[np.ndarray] = []
    begin = 0
    for kind, group in groupby(kinds.tolist()):
        places = len(list(group))
        if kind == 0:
            block = np.arange(places)[None].repeat(3, axis=0)
        else:
            t, h, w = next(grids[kind])
            block = np.indices((t, h // 2, w // 2)).reshape(3, -1)
            if kind == 2 and config.model_type == "qwen2_5_vl":
                per_second = config.vision_config.tokens_per_second
                block[0] = np.floor(block[0] * per_second * next(seconds))
            assert block.shape[1] == places
        found.append(block + begin)
        begin = found[-1].max() + 1
    return torch.from_numpy(np.concatenate(found, axis=1))


def _video_grids(pixels: Mapping[str, Any], config: Any) -> list[list[int]]:
    """Return grids of videos; Qwen3-VL has each pair of frames stand alone."""
    grids = pixels.get("video_grid_thw", torch.empty(0)).tolist()
    if not config.model_type.startswith("qwen3_vl"):
        return grids
    return [[1, h, w] for t, h, w in grids for _ in range(t)]
