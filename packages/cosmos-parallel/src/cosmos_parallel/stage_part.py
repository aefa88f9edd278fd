"""One pipeline stage of a model of transformers: the model itself, with a part of its layers.

transformers says which modules of a decoder make a pipeline (``base_model_pp_plan``): what embeds,
the layers, what norms. What another stage has is replaced by what lets hidden states through, so
that every stage runs the model's own forward pass, under the model's own names:

    first   tokens, pictures ─► part that sees, embedding, layers 0-1 ─► hidden
    last    hidden ─► layers 2-3, norm ─► hidden; and the model's own way from there to logits
"""

import copy
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from cosmos_parallel.context import divide_stage
from cosmos_parallel.cutting import pipeline_modules
from cosmos_parallel.errors import MeshError
from cosmos_parallel.packed_attention import noted_starts
from cosmos_parallel.pipeline import Call
from cosmos_parallel.rotary_axes import has_rotary_axes, spread
from cosmos_parallel.value_head import VALUE_HEAD, ValueHeadElsewhere

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# of a decoder that multiplies what goes into its layers (Granite), and of a config (AFMoE)
_MULTIPLIER = "embedding_multiplier"
_SCALES = "mup_enabled"


class StagePart(nn.Module):
    """What one stage has of a model.

    Attributes:
        model: without what other stages have.
        is_first: whether it takes tokens.
        is_last: whether it gives what the head takes.
        calls: those under way, which all stages know; set by who runs them.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        layers: range,
        num_layers: int,
        context: dist.ProcessGroup | None = None,
    ) -> None:
        """Take a whole model and drop what this stage has not, in place.

        Args:
            model: with value head and the like, if it is to have any, before FSDP2 shards it.
            layers: those of this stage.
            num_layers: of the whole.
            context: ranks that have a stretch of every sequence each between stages.

        Raises:
            MeshError: if the model's decoder has parameters of its own, or not the layers that it
                says.
        """
        super().__init__()
        self.model = model
        self.is_first = layers.start == 0
        self.is_last = layers.stop == num_layers
        self.calls: Sequence[Call] = ()
        self._has_axes = has_rotary_axes(model.config)
        self._decoder = _Decoder(model)
        self._decoder.cut(layers, num_layers, is_first=self.is_first, is_last=self.is_last)
        if not self.is_first:
            _drop_beside(model.base_model, self._decoder.module)
        if not self.is_last:
            _drop_behind(model)
        if context is not None:
            divide_stage(model, context, is_first=self.is_first, is_last=self.is_last)

    def forward(self, entering: Tensor, beside: Tensor) -> Tensor:
        """Run the layers; returns hidden states [B, T, dim], or a stretch of them.

        Args:
            entering: tokens [B, T], or what the stage before returned.
            beside: int64[1], which of ``calls`` this is.
        """
        call = self.calls[int(beside)]
        positions = spread(call.positions) if self._has_axes else call.positions
        rows: dict[str, Any] = {"position_ids": positions, "use_cache": False}
        with noted_starts(positions):
            if self.is_first:
                out = self.model.base_model(input_ids=entering, **rows, **call.others)
            else:
                out = self._decoder.module(inputs_embeds=entering, **rows)
        return out.last_hidden_state

    def outputs(self, call: Call, hidden: Tensor, keep: Mapping[str, Any]) -> Any:
        """Return what the whole model returns of a call whose hidden states are there.

        Args:
            call: what it was called with.
            hidden: of the last stage.
            keep: further arguments of the model's, such as ``logits_to_keep``.
        """
        with _standing_in(self.model, hidden):
            return self.model(input_ids=call.tokens, use_cache=False, **keep)

    @torch.no_grad()
    def check_entry(self, like: Tensor) -> None:
        """Check that the decoder does nothing to hidden states but what its modules do.

        Args:
            like: a tensor of the type and device of hidden states.

        Raises:
            MeshError: if it does, as every stage would.
        """
        width = int(self.model.config.get_text_config().hidden_size)
        hidden = torch.linspace(-1.0, 1.0, 2 * width).view(1, 2, width).to(like.device, like.dtype)
        with self._decoder.emptied() as decoder:
            # without its hooks, which divide sequences
            found = decoder.forward(inputs_embeds=hidden, use_cache=False).last_hidden_state
        if not torch.equal(found, hidden * self._decoder.factor):
            raise MeshError(
                f"pp: {type(decoder).__name__} changes what goes into its layers or comes out, "
                "which each stage would do anew; use tp and dp_shard"
            )


class _Decoder:
    """A decoder, and the names of what makes a pipeline in it."""

    def __init__(self, model: "PreTrainedModel") -> None:
        names = pipeline_modules(model.config.get_text_config())
        self.module: nn.Module = model.get_decoder()
        own = next(self.module.parameters(recurse=False), None)
        found = [
            name for name in names if isinstance(getattr(self.module, name, None), nn.ModuleList)
        ]
        if own is not None or len(found) != 1:
            kind = type(self.module).__name__
            raise MeshError(f"pp: {kind} is not made of one list of layers; use tp and dp_shard")
        self._stack = found[0]
        self._behind = names[names.index(self._stack) + 1 :]

    def cut(self, layers: range, num_layers: int, *, is_first: bool, is_last: bool) -> None:
        """Replace what a stage has not, in place."""
        stack = self.module.get_submodule(self._stack)
        if len(list(stack.children())) != num_layers:
            raise MeshError(
                f"pp: {type(self.module).__name__} does not have as many layers as its config says"
            )
        if not is_first:
            self._drop_factor()
        for name, layer in list(stack.named_children()):
            if int(name) not in layers:
                stack.register_module(name, _Through(layer))
        for name, part in list(self.module.named_children()):
            if name in self._behind and not is_last:
                self.module.register_module(name, nn.Identity())
            elif name not in (self._stack, *self._behind) and not is_first and _has_weights(part):
                self.module.register_module(name, _Elsewhere())

    @property
    def factor(self) -> float:
        """What the decoder's own pass multiplies what goes into its layers with."""
        module: Any = self.module
        if getattr(module.config, _SCALES, False):
            return float(module.config.hidden_size) ** 0.5
        return float(getattr(module, _MULTIPLIER, 1.0))

    def _drop_factor(self) -> None:
        """Multiply with nothing; only the first stage embeds."""
        module: Any = self.module
        if hasattr(module, _MULTIPLIER):
            module.embedding_multiplier = 1.0
        if getattr(module.config, _SCALES, False):
            module.config = copy.copy(module.config)  # the whole's says what it said
            module.config.mup_enabled = False

    @contextmanager
    def emptied(self) -> Generator[nn.Module]:
        """Inside the block, be a decoder without layers and norm."""
        stack = self.module.get_submodule(self._stack)
        places = [(stack, *each) for each in stack.named_children()]
        places += [
            (self.module, name, part)
            for name, part in self.module.named_children()
            if name in self._behind
        ]
        for holder, name, part in places:
            holder.register_module(name, _Through(part))
        try:
            yield self.module
        finally:
            for holder, name, part in places:
                holder.register_module(name, part)


def _drop_beside(body: nn.Module, decoder: nn.Module) -> None:
    """Replace what a model has beside its decoder, such as a part that sees."""
    for name, part in list(body.named_children()):
        if body is decoder or part is decoder:
            continue
        if decoder in set(part.modules()):
            _drop_beside(part, decoder)
        elif _has_weights(part):
            body.register_module(name, _Elsewhere())


def _drop_behind(model: "PreTrainedModel") -> None:
    """Replace what a model has behind its layers, such as its heads."""
    for name, part in list(model.named_children()):
        if name == VALUE_HEAD:
            model.register_module(name, ValueHeadElsewhere())
        elif part is not model.base_model and _has_weights(part):
            model.register_module(name, _Elsewhere())


def _has_weights(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None


class _Through(nn.Module):
    """Stands for a layer that another stage has: hidden states go through as they are."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            # a decoder may ask its layers of what kind they are
            if not name.startswith("_") and isinstance(value, (str, int, float)):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return args[0] if args else kwargs["hidden_states"]


class _Elsewhere(nn.Module):
    """Stands for a part that another stage has."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise MeshError("pp: this model uses a part of its first or last stage in another")


@contextmanager
def _standing_in(model: "PreTrainedModel", hidden: Tensor) -> Generator[None]:
    """Inside the block, have a model go on from hidden states."""
    body: nn.Module = model.base_model
    model.register_module(model.base_model_prefix, _Given(hidden))
    try:
        yield
    finally:
        model.register_module(model.base_model_prefix, body)


class _Given(nn.Module):
    """Stands for all that comes before a head."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> "_Hidden":
        return _Hidden(last_hidden_state=self._hidden)  # pyright: ignore[reportArgumentType]


class _Hidden(BaseModelOutputWithPast):
    """Hidden states, and nothing of what else a model may return."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
