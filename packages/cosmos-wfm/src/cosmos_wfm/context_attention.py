"""Self-attention from this rank's stretch of tokens to those of all ranks, for each denoiser.

Each class stands where diffusers has its own processor, and does the same with one thing more: keys
and values come from every rank. Nothing else of a block looks beyond its own token, but for
SANA-Video's convolution over frames, which is given the frames next to its own.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import relu, scaled_dot_product_attention

from cosmos_parallel import gather_sequence

Rotary = tuple[Tensor, Tensor]


def attend(
    query: Float[Tensor, "B q H d"], key: Float[Tensor, "B k H d"], value: Float[Tensor, "B k H d"]
) -> Float[Tensor, "B q Hd"]:
    """Return softmax attention, heads joined."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class _ContextAttention:
    """What the processors share: their group, projections and output."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def _all(self, stretch: Float[Tensor, "B t H d"]) -> Float[Tensor, "B T H d"]:
        return gather_sequence(stretch.contiguous(), self._group)


def _heads(attn: Any, projected: Float[Tensor, "B t Hd"]) -> Float[Tensor, "B t H d"]:
    return projected.unflatten(2, (attn.heads, -1))


def _normed(norm: nn.Module | None, values: Tensor) -> Tensor:
    return values if norm is None else norm(values)


def _out(attn: Any, hidden: Float[Tensor, "B t Hd"]) -> Float[Tensor, "B t D"]:
    return attn.to_out[1](attn.to_out[0](hidden))


class CosmosContextAttention(_ContextAttention):
    """For ``CosmosAttnProcessor2_0`` as self-attention."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Float[Tensor, "B t D"],
        encoder_hidden_states: None = None,
        attention_mask: None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> Float[Tensor, "B t D"]:
        """Attend to the tokens of all ranks."""
        query = _normed(attn.norm_q, _heads(attn, attn.to_q(hidden_states)))
        key = _normed(attn.norm_k, _heads(attn, attn.to_k(hidden_states)))
        value = _heads(attn, attn.to_v(hidden_states))
        if image_rotary_emb is not None:
            query, key = (_halves_rotated(part, image_rotary_emb) for part in (query, key))
        return _out(attn, attend(query, self._all(key), self._all(value)))


def _halves_rotated(values: Float[Tensor, "B t H d"], rotary: Rotary) -> Float[Tensor, "B t H d"]:
    cos, sin = (part[:, None, :] for part in rotary)
    one, other = values.chunk(2, dim=-1)
    crossed = torch.cat([-other, one], dim=-1)
    return (values.float() * cos + crossed.float() * sin).type_as(values)


class WanContextAttention(_ContextAttention):
    """For ``WanAttnProcessor`` as self-attention."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Float[Tensor, "B t D"],
        encoder_hidden_states: None = None,
        attention_mask: None = None,
        rotary_emb: Rotary | None = None,
    ) -> Float[Tensor, "B t D"]:
        """Attend to the tokens of all ranks."""
        query = _heads(attn, _normed(attn.norm_q, attn.to_q(hidden_states)))
        key = _heads(attn, _normed(attn.norm_k, attn.to_k(hidden_states)))
        value = _heads(attn, attn.to_v(hidden_states))
        if rotary_emb is not None:
            query, key = (_pairs_rotated(part, rotary_emb) for part in (query, key))
        return _out(attn, attend(query, self._all(key), self._all(value)))


def _pairs_rotated(values: Float[Tensor, "B t H d"], rotary: Rotary) -> Float[Tensor, "B t H d"]:
    one, other = values.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotary[0][..., 0::2], rotary[1][..., 1::2]
    turned = torch.stack([one * cos - other * sin, one * sin + other * cos], dim=-1)
    return turned.flatten(-2).type_as(values)


class JointContextAttention(_ContextAttention):
    """For ``JointAttnProcessor2_0``: a stretch of the picture, and the whole text on every rank."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Float[Tensor, "B t D"],
        encoder_hidden_states: Float[Tensor, "B L D"] | None = None,
        attention_mask: None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from picture and text to the picture of all ranks and the text."""
        query = _normed(attn.norm_q, _heads(attn, attn.to_q(hidden_states)))
        key = self._all(_normed(attn.norm_k, _heads(attn, attn.to_k(hidden_states))))
        value = self._all(_heads(attn, attn.to_v(hidden_states)))
        if encoder_hidden_states is None:
            return _out(attn, attend(query, key, value))
        text = encoder_hidden_states
        text_query = _normed(attn.norm_added_q, _heads(attn, attn.add_q_proj(text)))
        text_key = _normed(attn.norm_added_k, _heads(attn, attn.add_k_proj(text)))
        text_value = _heads(attn, attn.add_v_proj(text))
        joined = attend(
            torch.cat([query, text_query], dim=1),
            torch.cat([key, text_key], dim=1),
            torch.cat([value, text_value], dim=1),
        )
        picture, read = joined.split([query.shape[1], text_query.shape[1]], dim=1)
        if not attn.context_pre_only:
            read = attn.to_add_out(read)
        return _out(attn, picture), read


class SanaVideoContextAttention(_ContextAttention):
    """For ``SanaLinearAttnProcessor3_0``: what the ranks exchange is its d x d state."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Float[Tensor, "B t D"],
        encoder_hidden_states: None = None,
        attention_mask: None = None,
        rotary_emb: Rotary | None = None,
    ) -> Float[Tensor, "B t D"]:
        """Attend to the tokens of all ranks."""
        assert rotary_emb is not None
        query = relu(_heads(attn, _normed(attn.norm_q, attn.to_q(hidden_states))))
        key = relu(_heads(attn, _normed(attn.norm_k, attn.to_k(hidden_states))))
        value = _heads(attn, attn.to_v(hidden_states)).float()
        turned, turned_key = (_pairs_rotated(part, rotary_emb).float() for part in (query, key))
        state = self._summed(torch.einsum("bthv,bthk->bhvk", value, turned_key))
        total = self._summed(key.sum(1))
        scale = 1.0 / (torch.einsum("bhk,bthk->bth", total, query) + 1e-15)
        hidden = torch.einsum("bhvk,bthk->bthv", state, turned) * scale.unsqueeze(-1)
        return _out(attn, hidden.flatten(2).to(hidden_states.dtype))

    def _summed(self, part: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
        return self._all(part.unsqueeze(1)).sum(1)


def share_frames(block: Any, group: ProcessGroup) -> None:
    """Let a SANA-Video block's convolution over frames see the frames of the next ranks.

    Args:
        block: whose feed-forward part has the convolution.
        group: ranks with neighbouring stretches of frames, in order.
    """

    def widen(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        frames: Float[Tensor, "B C t s"] = args[0]
        ends = torch.stack([frames[:, :, 0], frames[:, :, -1]], dim=1)
        everywhere = gather_sequence(ends.contiguous(), group)
        nothing = torch.zeros_like(frames[:, :, :1])
        rank, last = group.rank(), group.size() - 1
        before = everywhere[:, 2 * rank - 1].unsqueeze(2) if rank > 0 else nothing
        after = everywhere[:, 2 * rank + 2].unsqueeze(2) if rank < last else nothing
        return (torch.cat([before, frames, after], dim=2),)

    def narrow(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output[:, :, 1:-1]

    convolution: nn.Module = block.ff.conv_temp
    convolution.register_forward_pre_hook(widen)
    convolution.register_forward_hook(narrow)
