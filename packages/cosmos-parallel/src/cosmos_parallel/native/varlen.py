"""torch's kernel for samples of any length side by side (FlashAttention), where a GPU has it.

It takes rows as they are: neither a mask nor padding. What it does not compute (float32, heads of
two widths as in latent attention, sinks, of whose sums it gives no gradient) is attended to in
blocks.
"""

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from cosmos_parallel.sample_blocks import PackedRows

_MOST_WIDTH, _STEP_OF_WIDTH = 256, 8
_LEAST_CAPABILITY = (8, 0)


def runs_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel computes attention of such queries and values, on their device.

    Args:
        query: ``[B, T, heads, D]``.
        value: ``[B, T, key heads, E]``.
    """
    width = query.shape[3]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and value.shape[3] == width <= _MOST_WIDTH
        and width % _STEP_OF_WIDTH == 0
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= _LEAST_CAPABILITY
    )


def attend_by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedRows,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attend within each sample of packed rows; returns ``[B, T, heads, D]``.

    Args:
        query: ``[B, T, heads, D]``.
        key: ``[B, T, key heads, D]``.
        value: ``[B, T, key heads, D]``.
        packed: how the rows fall apart.
        scale: of the scores; ``None`` for one over the root of D.
        window: how many tokens a query sees, itself the last; ``None`` for all before it.
    """
    offsets, longest = packed.offsets, packed.longest
    out = varlen_attn(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        offsets,
        offsets,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
    )
    assert isinstance(out, Tensor), "sums are not asked for"
    return out.unflatten(0, query.shape[:2])
