"""Rotary embeddings whose frequencies depend on how long a sequence is, held at one length.

transformers chooses them anew in every pass, by its longest position: with LongRoPE (Ding et al.,
2024) and dynamic NTK scaling a sample's log-probabilities change with what it is batched with. An
engine chooses once, by the longest sequence that it serves (vLLM). So does a model held here.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional

from cosmos_parallel.errors import MeshError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_POSITIONS = 1  # the argument's place behind hidden states


def hold_length(model: "PreTrainedModel", length: int | None, *, is_divided: bool = False) -> None:
    """Have a model turn all positions as it does where the longest sequence has so many tokens.

    Args:
        model: of any rotary embedding; one that does not go by length is left as it is.
        length: tokens of the longest sequence that the model is trained on and served with; 0 for
            what vLLM takes by itself: for LongRoPE the original length, else that of the config.
            ``None`` leaves it to each pass.
        is_divided: whether a pass of this rank has a part of each sequence only, or a longer one.

    Raises:
        MeshError: if a pass would have to say, and does not know.
    """
    turning = [module for module in model.modules() if _changes(module)]
    if length is not None:
        for module in turning:
            _Held(module, (length or _own_length(model)) - 1)
    elif turning and is_divided:
        raise MeshError(
            f"cp, pp: the rotary embedding of this {model.config.model_type} model goes by the "
            "length of a sequence, which a rank does not see: give context_length"
        )


class _Held:
    """Adds the last position of the longest sequence to each pass, and takes it off again."""

    def __init__(self, module: nn.Module, last: int) -> None:
        self._last = last
        module.register_forward_pre_hook(self._add, with_kwargs=True)
        module.register_forward_hook(self._take_off)

    def _add(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": self._extended(kwargs["position_ids"])}
        extended = self._extended(args[_POSITIONS])
        return (*args[:_POSITIONS], extended, *args[_POSITIONS + 1 :]), kwargs

    def _extended(self, positions: Tensor) -> Tensor:
        return functional.pad(positions, (0, 1), value=self._last)

    def _take_off(
        self, module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        return tuple(part[..., :-1, :] for part in output)


def _own_length(model: "PreTrainedModel") -> int:
    settings: Any = model.config.get_text_config()  # of its own class in each model
    rope: dict[str, Any] = settings.rope_parameters or {}
    longest: int = settings.max_position_embeddings
    if rope.get("rope_type") != "longrope":
        return longest
    return int(getattr(settings, "original_max_position_embeddings", None) or longest)


def _changes(module: nn.Module) -> bool:
    kinds: Any = getattr(module, "rope_type", ())
    kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
    is_buffer = any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
    return is_buffer and any(kind == "longrope" or "dynamic" in kind for kind in kinds)
