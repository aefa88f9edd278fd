"""Context parallelism for models of transformers: each rank has a stretch of every sequence.

The attention function is exchanged, and a model's entry and the end of its layers are hooked; names
stay as they were. A decoder of text is given a stretch of the tokens. A model that sees embeds
whole sequences, pictures among them, and its decoder is given a stretch of those:

    tokens   t t p p p p | p p t t t t      what rank 0 and rank 1 attend from
    vision   1 picture     2 frames         looked at by one rank each (`share_sight`)

Where a vision part cannot be shared every rank looks at all, and goes on with its stretch. Between
the stages of a pipeline go stretches: the first divides, the last gathers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from cosmos_parallel.changed_scores import attend_spelled_out, changes_scores
from cosmos_parallel.context_sight import share_pictures, share_sight
from cosmos_parallel.errors import MeshError
from cosmos_parallel.packed_attention import (
    CONTEXT_ATTENTION,
    attend_by,
    row_layers,
    takes_any_attention,
)
from cosmos_parallel.rotary_axes import has_rotary_axes, sees, whole_axes
from cosmos_parallel.sequences import Visibility, gather_sequence, kept_columns, padded_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def divide_context(model: "PreTrainedModel", group: dist.ProcessGroup) -> None:
    """Give each rank of a group its stretch of the sequences, and the head whole ones.

    Args:
        model: that `attend_from_stretches` has prepared, before FSDP2 shards it.
        group: the ranks that share sequences.

    Raises:
        MeshError: if the model has no output head of its own.
    """
    _ContextHooks(group).hook(model)


def divide_stage(
    model: "PreTrainedModel", group: dist.ProcessGroup, *, is_first: bool, is_last: bool
) -> None:
    """Have a stage of a pipeline run each rank's stretch of the sequences.

    Args:
        model: that `attend_from_stretches` has prepared, cut to the stage, before FSDP2 shards it.
        group: the ranks that share sequences.
        is_first: whether the stage is given whole ones, tokens [B, T]; others are given stretches
            [B, T / ranks, dim]. T is a multiple of the ranks.
        is_last: whether it returns whole ones.
    """
    _ContextHooks(group).hook_stage(model, is_first=is_first, is_last=is_last)


def attend_from_stretches(model: "PreTrainedModel") -> None:
    """Have a model attend from this rank's stretch of the sequences to whole ones.

    Args:
        model: with torch's scaled dot-product attention.

    Raises:
        MeshError: if the model runs an attention of its own, or has layers that do not go by the
            whole of a sample.
    """
    name = model.config.model_type
    if not takes_any_attention(model):
        raise MeshError(f"cp: {name} runs an attention or positions of its own; use dp_shard")
    if others := row_layers(model):
        raise MeshError(
            f"cp: {name} has {', '.join(others)} layers, which would end where a rank's stretch "
            "of a sequence does; use dp_shard"
        )
    _register()
    attend_by(model, CONTEXT_ATTENTION)


@dataclass(slots=True)
class _Call:
    """One forward pass under way.

    Attributes:
        length: columns that the caller gave.
        keep: columns of which the caller wants logits; 0 for all.
        blocks: [B, length], numbers of pictures from 1 on and 0 for text, where tokens of one
            picture see each other both ways.
    """

    length: int
    keep: int | Tensor
    blocks: Tensor | None = None


class _ContextHooks:
    """Divides what goes into a model or its decoder, and gathers what comes to its head."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._call = _Call(0, 0)
        self._has_axes = False

    def hook(self, model: "PreTrainedModel") -> None:
        """Divide and gather in a whole model."""
        head, decoder = model.get_output_embeddings(), model.get_decoder()
        body: nn.Module = model.base_model if decoder is head else decoder  # so in ModernBERT
        if head is None or body is model:
            raise MeshError(f"cp: {type(model).__name__} has no output head to gather before")
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        self._hook_entry(model, body, model)
        body.register_forward_hook(self._gather)

    def hook_stage(self, model: "PreTrainedModel", *, is_first: bool, is_last: bool) -> None:
        """Divide in a first stage, and gather in a last one."""
        decoder: nn.Module = model.get_decoder()
        self._has_axes = has_rotary_axes(model.config)
        if is_first:
            self._hook_entry(model, decoder, model.base_model)
        else:
            decoder.register_forward_pre_hook(self._divide_positions, with_kwargs=True)
        if is_last:
            decoder.register_forward_hook(self._gather_all)

    def _hook_entry(self, model: "PreTrainedModel", body: nn.Module, entry: nn.Module) -> None:
        """Divide embedded pictures and tokens that go into ``body``, or tokens of ``entry``."""
        if has_rotary_axes(model.config):
            body.register_forward_pre_hook(self._divide_embeddings, with_kwargs=True)
            share_sight(model, self._group)
        elif sees(model.config):
            body.register_forward_pre_hook(self._divide_counted, with_kwargs=True)
            share_pictures(model, self._group)
        else:
            entry.register_forward_pre_hook(self._divide_tokens, with_kwargs=True)

    def _enter(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args or kwargs.get("attention_mask") is not None:
            raise MeshError("cp: call the model with input_ids and position_ids only, by name")
        kinds: Tensor | None = kwargs.get("token_type_ids")
        self._call = _Call(
            kwargs["input_ids"].shape[1],
            kwargs.pop("logits_to_keep", 0),
            None if kinds is None else _pictures(kinds == 1),
        )
        return (), kwargs

    def _divide_tokens(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens, positions = padded_rows(
            kwargs["input_ids"], kwargs.get("position_ids"), self._group.size()
        )
        return args, kwargs | {
            "input_ids": self._stretch(tokens),
            "position_ids": self._stretch(positions),
            "visibility": Visibility.of(positions, self._group),
        }

    def _divide_embeddings(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Divide rows of embedded tokens and pictures, on their way into the decoder."""
        embedded: Tensor = kwargs["inputs_embeds"]
        missing = (0, -embedded.shape[1] % self._group.size())
        # what is added belongs to the sample before it, as no position is 0
        axes = functional.pad(whole_axes(kwargs.get("position_ids"), embedded), missing, value=1)
        seen: Tensor | None = kwargs.get("visual_pos_masks")
        if seen is not None:
            mine = self._stretch(functional.pad(seen, missing))
            deep: Sequence[Tensor] = kwargs["deepstack_visual_embeds"]
            place = self._stretch(functional.pad(_places(seen), missing))[mine]
            kwargs = kwargs | {
                "visual_pos_masks": mine,
                "deepstack_visual_embeds": [each[place] for each in deep],
            }
        return args, kwargs | {
            "inputs_embeds": self._stretch(functional.pad(embedded, (0, 0, *missing))),
            "position_ids": self._stretch(axes, dim=2),
            "visibility": Visibility.of(axes[0], self._group),
        }

    def _divide_counted(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Divide rows of embedded tokens and pictures, for a decoder that counts both alike."""
        embedded: Tensor = kwargs["inputs_embeds"]
        rows = embedded.shape[:2]
        positions: Tensor | None = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(rows[1], device=embedded.device)
        missing = (0, -rows[1] % self._group.size())
        # what is added belongs to the sample before it, as no position is 0
        positions = functional.pad(positions.expand(rows), missing, value=1)
        return args, kwargs | {
            "inputs_embeds": self._stretch(functional.pad(embedded, (0, 0, *missing))),
            "position_ids": self._stretch(positions),
            "visibility": Visibility.of(
                positions,
                self._group,
                None if self._call.blocks is None else functional.pad(self._call.blocks, missing),
            ),
        }

    def _divide_positions(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Tell a later stage where the stretches that it is given stand in their rows."""
        stretch: Tensor = kwargs["inputs_embeds"]
        whole = stretch.new_empty(stretch.shape[0], stretch.shape[1] * self._group.size())
        axes = whole_axes(kwargs.get("position_ids"), whole)
        return args, kwargs | {
            "position_ids": self._stretch(axes if self._has_axes else axes[0], dim=-1),
            "visibility": Visibility.of(axes[0], self._group),
        }

    def _stretch(self, rows: Tensor, dim: int = 1) -> Tensor:
        return rows.chunk(self._group.size(), dim=dim)[self._group.rank()]

    def _gather(self, body: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Give what stands behind all layers, an output head or a value head, whole sequences."""
        hidden = gather_sequence(output.last_hidden_state, self._group)
        output.last_hidden_state = kept_columns(hidden, self._call.length, self._call.keep)
        return output

    def _gather_all(self, body: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Give what a last stage goes to whole sequences."""
        output.last_hidden_state = gather_sequence(output.last_hidden_state, self._group)
        return output


def _pictures(shown: Tensor) -> Tensor:
    """Return the number of each token's picture, counted in its row from 1 on, and 0 for text.

    Pictures with nothing between them are one, as in Gemma 3.

    Args:
        shown: bool[B, T], true on tokens of pictures.
    """
    begins = shown & ~functional.pad(shown, (1, 0))[:, :-1]
    return begins.cumsum(dim=1) * shown


def _places(seen: Tensor) -> Tensor:
    """Return which picture's token each of [B, T] is, counted over all rows; others' are of no use.

    Args:
        seen: bool[B, T], true on tokens of pictures.
    """
    return (seen.flatten().cumsum(0) - 1).view_as(seen)


def _register() -> None:
    """Make the attention function known to transformers by name; may be called twice."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(CONTEXT_ATTENTION, _context_attention)
    AttentionMaskInterface.register(CONTEXT_ATTENTION, _no_mask)


def _no_mask(*args: object, **kwargs: object) -> None:
    """Stand in for the masks of transformers, which know the sequence of one rank only."""


def _context_attention(  # noqa: PLR0913 - the interface of transformers
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    visibility: Visibility | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from this rank's stretch ``[B, H, T / ranks, d]`` to whole sequences."""
    if visibility is None or visibility.group is None:
        raise MeshError("cp: this model does not hand its attention what it is called with")
    keys, values = (
        gather_sequence(part.transpose(1, 2), visibility.group) for part in (key, value)
    )
    mask = visibility.mask_of(sliding_window)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if changes_scores(kwargs):
        settings = kwargs | {"scaling": scaling}
        return attend_spelled_out(query, keys, values, mask, settings), None
    out = functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None
