"""Attention of transformers' models over rows that hold several samples, sample by sample.

Several samples in one row, told apart by position ids that start again, are transformers' own form
of padding-free training. Its fused kernels for GPUs run them as they are; scaled dot-product
attention would multiply out a block-diagonal mask. ``packed_sdpa`` is that attention in blocks (see
``sample_blocks``). Samples are told apart by the positions that the model is called with: not every
model hands them on to transformers' masks.
"""

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional

from cosmos_parallel.changed_scores import attend_spelled_out, changes_scores
from cosmos_parallel.errors import PackingError
from cosmos_parallel.rotary_axes import has_rotary_axes, sees, spread_text_positions
from cosmos_parallel.sample_blocks import MaskFunction, PackedRows, attend_in_blocks, packed_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKED_SDPA = "cosmos_packed"  # transformers refuses names with "sdpa" to models with sinks
CONTEXT_ATTENTION = "cosmos_context"
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
_MASKS_OF_THEIR_OWN = frozenset({"doge"})
# bool[B, T], where samples begin in the rows of the pass under way, if not at a row's start alone
_STARTS: ContextVar[Tensor | None] = ContextVar("starts of samples", default=None)


def use_packed_attention(model: "PreTrainedModel") -> bool:
    """Have a model that uses scaled dot-product attention run packed rows sample by sample.

    Rows of one sample, padding masks and caches take the ordinary way. Sinks and bounded scores,
    which torch's function has not, are computed too. The model's own config is not written to.

    Returns:
        Whether the model can: false where it does not look its attention up by name, is not told
        positions, or runs another one already.
    """
    has_torchs = getattr(model, "_supports_sdpa", False)
    if _attention_of(model) != ("sdpa" if has_torchs else "eager"):
        return False
    if not takes_any_attention(model) or (not has_torchs and row_layers(model)):
        return False
    _register()
    attend_by(model, PACKED_SDPA)
    spread_text_positions(model)
    model.register_forward_pre_hook(_note_starts, with_kwargs=True)
    model.register_forward_hook(_forget_starts, always_call=True)
    return True


def takes_any_attention(model: nn.Module) -> bool:
    """Whether a model looks its attention up by name, and is told the positions of its tokens."""
    can_change: Callable[[], bool] | None = getattr(model, "_can_set_attn_implementation", None)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    return takes_positions and can_change is not None and can_change()


def attend_by(model: "PreTrainedModel", name: str) -> None:
    """Have the decoder of a model run an attention function of its own, and other parts torch's."""
    names = dict.fromkeys(model.config.sub_configs, "sdpa")
    for part in ("", "text_config"):
        if part == "" or part in names:
            names[part] = name
    model.set_attn_implementation(names)


def check_packable(model: nn.Module) -> None:
    """Refuse to pack samples for a model that cannot tell the samples of a row apart.

    Raises:
        PackingError: naming the layers that carry a state from one sample into the next, an
            attention that does not go by samples, or the type of a model that sees and has no
            positions for such rows.
    """
    config: Any = getattr(model, "config", None)  # any Hugging Face configuration
    if config is None:
        raise PackingError(f"{type(model).__name__} is not of Hugging Face; use the padded layout")
    if getattr(model, "tells_samples_apart", False):
        return
    if others := row_layers(model):
        raise PackingError(
            f"{config.model_type} has {', '.join(others)} layers, which go on from one sample of a "
            "row into the next; use the padded layout"
        )
    if hasattr(model, "set_attn_implementation") and not _goes_by_samples(model):
        raise PackingError(
            f"the attention of this {config.model_type} model ({_attention_of(model)}) is not told "
            "which sample of a row a token belongs to; load it with attention sdpa, or use the "
            "padded layout"
        )
    if sees(config) and not has_rotary_axes(config):
        raise PackingError(
            f"{config.model_type} models see pictures, and are not told which sample of a row a "
            "picture belongs to; use the padded layout"
        )


def runs_packed_rows(model: nn.Module) -> bool:
    """Whether a model attends within samples of a row at no more cost than by themselves.

    True for ``packed_sdpa`` and for the fused kernels of transformers, where no layer carries a
    state from token to token, and pictures can be told apart too; and for torchtitan's models that
    say so.
    """
    if getattr(model, "tells_samples_apart", False):
        return bool(getattr(model, "runs_packed_rows", False))
    config: Any = getattr(model, "config", None)  # any Hugging Face configuration
    if config is None:
        return False
    fused = _goes_by_samples(model) and _attention_of(model) != CONTEXT_ATTENTION
    tells_pictures = not sees(config) or has_rotary_axes(config)
    return fused and not row_layers(model) and tells_pictures


def row_layers(model: nn.Module) -> list[str]:
    """Return which kinds of layers of a model of Hugging Face go by rows, and not by samples.

    They carry a state from token to token, look at chunks that are counted from a row's start, or
    choose what they look at in the whole row.
    """
    loaded: Any = model  # of Hugging Face
    decoder: nn.Module = loaded.get_decoder() if hasattr(loaded, "get_decoder") else model
    convolves = any(isinstance(part, nn.Conv1d) for part in decoder.modules())
    return state_layers(loaded.config.get_text_config()) or ["convolution"] * convolves


def state_layers(settings: Any) -> list[str]:
    """Return which kinds of a decoder's layers do more than attend to a sample's last tokens.

    Args:
        settings: the decoder's config.
    """
    others = sorted(set(getattr(settings, "layer_types", None) or ()) - ATTENTION_LAYERS)
    return others + ["dynamic-mask"] * (settings.model_type in _MASKS_OF_THEIR_OWN)


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PackedRows | Tensor | None,
    **kwargs: Any,  # what transformers hands to every attention function
) -> tuple[Tensor, None]:
    """Attend within each sample; rows that are not packed take the ordinary way.

    Args:
        module: the attention layer.
        query: [B, heads, T, D].
        key: [B, key heads, T, D].
        value: [B, key heads, T, E].
        attention_mask: how the rows fall apart, or an ordinary mask.
        **kwargs: as for every attention function of transformers.

    Returns:
        [B, T, heads, E], and no attention weights.
    """
    if not isinstance(attention_mask, PackedRows):
        return _attend(module, query, key, value, attention_mask, **kwargs), None
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    attend = partial(_attend, module, **kwargs)
    return attend_in_blocks(query, key, value, attention_mask, attend), None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **kwargs: Any,
) -> Tensor:
    """Return [B, T, heads, E] of rows, or of samples, that are no more than that."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if changes_scores(kwargs):
        return attend_spelled_out(query, key, value, mask, kwargs)
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]


def _attention_of(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "_attn_implementation", ""))


def _goes_by_samples(model: nn.Module) -> bool:
    name = _attention_of(model)
    return name in (PACKED_SDPA, CONTEXT_ATTENTION) or name.startswith("flash_attention")


def _register() -> None:
    """Make the attention known to transformers by name; may be called twice."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED_SDPA, packed_sdpa)
    AttentionMaskInterface.register(PACKED_SDPA, _packed_mask)


def _packed_mask(
    *, mask_function: MaskFunction, attention_mask: Tensor | None = None, **kwargs: Any
) -> PackedRows | Tensor | None:
    """Return how rows fall apart into samples; for all others, a mask as torch's function has it.

    Called once in a forward pass and kind of layer, with what transformers hands to every mask
    function.
    """
    from transformers.masking_utils import sdpa_mask

    starts = _STARTS.get(None)
    if starts is None or kwargs.get("use_vmap", False):
        return sdpa_mask(mask_function=mask_function, attention_mask=attention_mask, **kwargs)
    return packed_rows(starts, mask_function)


@contextmanager
def noted_starts(positions: Tensor | None) -> Generator[None]:
    """Have a part of a model that is called inside the block attend sample by sample.

    Args:
        positions: of the rows that it is called with, as `use_packed_attention`'s models take them.
    """
    _STARTS.set(_starts(positions))
    try:
        yield
    finally:
        _STARTS.set(None)


def _note_starts(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note where samples begin in the rows that a model is called with."""
    masked = kwargs.get("attention_mask") is not None
    _STARTS.set(None if masked else _starts(kwargs.get("position_ids")))


def _starts(positions: Tensor | None) -> Tensor | None:
    if positions is None:
        return None
    if positions.ndim == 3:  # of text, time, height and width; without text, rows of one sample
        if len(positions) != 4:
            return None
        positions = positions[0]
    starts = functional.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0))
    return starts if bool(starts.any()) else None


def _forget_starts(model: nn.Module, args: tuple[Any, ...], output: object) -> None:
    _STARTS.set(None)
