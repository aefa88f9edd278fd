"""Attention whose scores are changed before they are weights: bounded ones, and sinks.

torch's scaled dot-product attention has neither, and what transformers hands it of them is dropped
without a word: Gemma 2, loaded with ``sdpa``, is another model than the one that was trained.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def changes_scores(settings: Mapping[str, Any]) -> bool:
    """Whether a model's attention does more to its scores than to scale and to mask them.

    Args:
        settings: what transformers hands to an attention function by name.
    """
    return any(settings.get(name) is not None for name in ("softcap", "s_aux"))


def attend_spelled_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    settings: Mapping[str, Any],
) -> Tensor:
    """Return what each query makes of the values, with every score held at once.

    Scores s become ``c tanh(s / c)`` for a ``softcap`` c (Gemma 2, Gemma Team, 2024, section 2),
    and each head's sink ``s_aux`` takes its part of the weights and gives no value (GPT-OSS,
    OpenAI, 2025). Weights are made in float32, or in float64 of float64.

    Args:
        query: [B, heads, Tq, D].
        key: [B, key heads, Tk, D].
        value: [B, key heads, Tk, E].
        mask: bool[B, 1, Tq, Tk], true where a query sees a key; ``None`` where each sees its own
            and what is before it, the last query being the last key.
        settings: what transformers hands to an attention function by name.

    Returns:
        [B, Tq, heads, E].
    """
    groups = query.shape[1] // key.shape[1]
    scale = settings.get("scaling")
    scores = query @ key.repeat_interleave(groups, dim=1).transpose(2, 3)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores * (query.shape[3] ** -0.5 if scale is None else scale)
    softcap: float | None = settings.get("softcap")
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device)
        mask = seen.tril(scores.shape[3] - scores.shape[2])
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    sinks: Tensor | None = settings.get("s_aux")
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=3)
    weights = scores.softmax(dim=3)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value.repeat_interleave(groups, dim=1)).transpose(1, 2).contiguous()
