"""Attention and experts that are exact in any precision, for torchtitan's models.

torchtitan's own attention for language models needs kernels that CPUs lack, and its experts always
compute in bfloat16. These have the same interfaces and take part in its sharding.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from torchtitan.protocols.module import Module

from cosmos_parallel.native.varlen import attend_by_kernel, runs_kernel
from cosmos_parallel.sequences import Visibility, attend_where_seen, causal_mask


class ExactAttention(Module):
    """Scaled dot-product attention over whole, packed or divided sequences.

    Samples of packed rows are attended to in blocks of like length, or by a kernel for samples of
    any length where there is one. Divided rows have a mask.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """What differs from layer to layer.

        Attributes:
            window: how many tokens a query sees, itself the last; ``None`` for all before it.
        """

        window: int | None = None

    def __init__(self, config: Config) -> None:
        """Make it."""
        super().__init__()
        self._window = config.window

    def forward(
        self,
        q_BLNH: Tensor,  # noqa: N803 - torchtitan's sharding finds arguments by these names
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: Visibility,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return ``[B, L, N, H]`` from queries ``[B, L, N, H]``, keys and values."""
        packed = attention_masks.packed
        if packed is not None and runs_kernel(q_BLNH, v_BLNH):
            return attend_by_kernel(
                q_BLNH, k_BLNH, v_BLNH, packed, scale=scale, window=self._window
            )
        attend = partial(self._attend, scale=scale, enable_gqa=enable_gqa)
        return attend_where_seen(q_BLNH, k_BLNH, v_BLNH, attention_masks, self._window, attend)

    def _attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        *,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        """Return [B, L, N, H] of [B, N, L, H]; without a mask, of whole samples."""
        if mask is None and self._window is not None and self._window < queries.shape[2]:
            mask = causal_mask(queries, self._window)
        out = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out.transpose(1, 2)


class ExactExperts(GroupedExperts):
    """SwiGLU experts that compute in the type of their weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """As torchtitan's."""

    def forward(
        self,
        x_RD: Tensor,  # noqa: N803
        num_tokens_per_expert_E: Tensor,  # noqa: N803
    ) -> Tensor:
        """Run the tokens, sorted by expert, through their experts."""
        gate, down, up = (
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        ends = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)

        def project(tokens: Tensor, weight: Tensor) -> Tensor:
            return self._grouped_mm(A=tokens, B_t=weight.transpose(-2, -1), offs=ends)

        tokens = x_RD.to(gate.dtype)
        hidden = functional.silu(project(tokens, gate)) * project(tokens, up)
        return project(hidden, down).type_as(x_RD)


class HalvesRoPE(CosSinRoPE):
    """Rotary embedding on halves of a head, as in Hugging Face checkpoints, at given frequencies.

    torchtitan has Llama 3's scaling for pairs only, which needs the rows of queries and keys in
    another order than checkpoints have.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """As torchtitan's, with the frequencies spelled out.

        Attributes:
            inv_freq: half as many as a head is wide.
            factor: on cosine and sine (YaRN).
        """

        inv_freq: tuple[float, ...]
        factor: float = 1.0

    def __init__(self, config: Config) -> None:
        """Make it."""
        self._settings = config
        super().__init__(config)

    def _precompute_cache(self) -> Tensor:
        settings = self._settings
        angles = _angles(settings.inv_freq, settings.max_seq_len)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * settings.factor


class PairsRoPE(ComplexRoPE):
    """Rotary embedding on neighbours, as in DeepSeek's checkpoints, at given frequencies."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        """As torchtitan's, with the frequencies spelled out.

        Attributes:
            inv_freq: half as many as are rotated.
            factor: on cosine and sine (YaRN).
        """

        inv_freq: tuple[float, ...]
        factor: float = 1.0

    def __init__(self, config: Config) -> None:
        """Make it."""
        self._settings = config
        super().__init__(config)

    def _precompute_cache(self) -> Tensor:
        settings = self._settings
        angles = _angles(settings.inv_freq, settings.max_seq_len)
        return torch.polar(torch.full_like(angles, settings.factor), angles)


def _angles(inv_freq: tuple[float, ...], length: int) -> Tensor:
    """Return the angle of each frequency at each position: float32 ``[length, frequencies]``."""
    positions = torch.arange(length, dtype=torch.float32)
    return torch.outer(positions, torch.tensor(inv_freq, dtype=torch.float32))
