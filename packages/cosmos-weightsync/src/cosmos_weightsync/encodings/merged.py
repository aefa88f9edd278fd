"""A model with its LoRA adapter added to the weights, which happens on the way into what is sent.

peft's own ``merge_adapter`` adds the adapter to the weights in place, and ``unmerge_adapter`` takes
it away. Both round, so in bfloat16 the frozen weights become others with every version. Here the
sum is made in float32 and rounded once; the model stays as it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from cosmos_weightsync.encodings.cast import Cast
from cosmos_weightsync.encodings.contract import Extents
from cosmos_weightsync.encodings.encoded import EncodedShards
from cosmos_weightsync.encodings.selection import LORA_PARTS, adapter_config
from cosmos_weightsync.errors import LayoutError
from cosmos_weightsync.layout import ShardSpec
from cosmos_weightsync.living import LiveTensor
from cosmos_weightsync.shards import Shard, cast_spec, held_boxes, live_tensors, shards_of_live

__all__ = ["merged_shards"]

_PREFIX = "base_model.model."
_SAVED = "modules_to_save"
_NOT_MERGED = ("use_dora", "lora_bias", "trainable_token_indices")


class AdaptedLayer(Protocol):
    """What peft's layers can do; it may have none of these names but the adapter's own."""

    merged_adapters: list[str]

    def get_base_layer(self) -> nn.Module:
        """The layer that the adapter is for."""
        ...

    def get_delta_weight(self, adapter: str) -> Tensor:
        """What the adapter adds to the weight, in the shape of that."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class _Merged:
    """An encoding: weights, with what their layers' adapters add at that moment.

    Attributes:
        layers: By the name of the weight.
        gathering: The modules that might have gathered them.
        adapter: Which.
        dtype: What they are sent as; empty as they are.
    """

    layers: Mapping[str, Sequence[AdaptedLayer]]
    gathering: Sequence[FSDPModule]
    adapter: str
    dtype: str
    kind: Literal["merged"] = "merged"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of modules have none of the signs that patterns have."""
        return tuple(self.layers)

    def published(self, spec: ShardSpec) -> tuple[ShardSpec, ...]:
        """The same box, maybe in the other dtype."""
        return (cast_spec(spec, self.dtype),)

    def blocks(self, spec: ShardSpec) -> tuple[Extents, ...]:
        """None are needed."""
        del spec
        return ()

    def together(self, spec: ShardSpec) -> tuple[str, ...]:
        """Nothing is shared."""
        del spec
        return ()

    def write(self, shard: Shard, maxima: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """See `Encoding.write`."""
        del maxima
        for module in self.gathering:  # Gathered ones may be rounded already.
            module.reshard()
        total = shard.tensor
        for layer in self.layers[shard.spec.name]:
            if self.adapter not in layer.merged_adapters:
                added = _part(layer.get_delta_weight(self.adapter), shard)
                total = total.to(torch.promote_types(total.dtype, torch.float32)) + added
        into[0].copy_(total, non_blocking=True)


def merged_shards(module: nn.Module, adapter: str = "default", *, dtype: str = "") -> EncodedShards:
    """What this rank holds of a model with a LoRA adapter, the adapter added, for `WeightSender`.

    Names are those of the model without peft. The sums are made by `WeightSender.publish`, from the
    weights and the adapter as they are then; nothing in the module changes. An adapter that peft
    has merged at that moment is not added once more. Where FSDP2 has sharded the model, a layer's
    factors are gathered for a moment: all ranks publish together, from the thread that trains.

    Args:
        module: A ``PeftModel``, wrapped or not.
        adapter: The adapter's name.
        dtype: What floating tensors are sent as, such as ``bfloat16``; as they are if empty.

    Raises:
        LayoutError: there is no such adapter, it is more than plain LoRA, or the weights it is for
            are quantised or tied to others.

    Example:
        >>> sender = WeightSender(merged_shards(model, dtype="bfloat16"))
        >>> sender.publish(trainer.state.global_step)
    """
    config = adapter_config(module, adapter)
    for option in _NOT_MERGED:
        if config.get(option):
            raise LayoutError(
                f"adapter {adapter!r}: {option} is not plain LoRA: publish a model that peft has "
                "merged it into"
            )
    lives = list(_without_adapters(module, adapter))
    layers = _adapted(module, adapter)
    if not layers:
        raise LayoutError(f"adapter {adapter!r} has no LoRA tensors")
    named: dict[str, Sequence[AdaptedLayer]] = {}
    seen: dict[int, LiveTensor] = {}
    for live in lives:
        first = seen.setdefault(id(live.tensor), live)
        if id(live.tensor) not in layers:
            continue
        if first is not live:
            raise LayoutError(
                f"{first.name}: has an adapter, and {live.name} is the same tensor and has none: "
                "untie them, or leave that layer out of the adapter's target_modules"
            )
        if not live.tensor.is_floating_point():
            raise LayoutError(f"{live.name}: is quantised ({live.tensor.dtype}): nothing is added")
        named[live.name] = layers[id(live.tensor)]
    gathering = [part for part in module.modules() if isinstance(part, FSDPModule)]
    shards = [shard for live in seen.values() for shard in shards_of_live(live)]
    return EncodedShards(
        shards, [_Merged(named, gathering, adapter, dtype), Cast(dtype=dtype)], None
    )


def _without_adapters(module: nn.Module, adapter: str) -> Iterator[LiveTensor]:
    """The tensors that the model would have with the adapter merged, by their names then."""
    for live in live_tensors(module, tied="each"):
        name = _merged_name(live.name, adapter)
        if name is not None:
            yield replace(live, name=name)


def _merged_name(name: str, adapter: str) -> str | None:
    """``….q_proj.base_layer.weight`` is ``….q_proj.weight``; what is in no such model is ``None``.

    Of a module that trains whole, peft keeps the frozen original beside the adapter's copy.
    """
    parts = name.removeprefix(_PREFIX).split(".")
    if any(part in LORA_PARTS for part in parts) or "original_module" in parts:
        return None
    if _SAVED in parts:
        place = parts.index(_SAVED)
        if parts[place + 1] != adapter:
            return None
        del parts[place : place + 2]
    return ".".join(part for part in parts if part != "base_layer")


def _adapted(module: nn.Module, adapter: str) -> dict[int, list[AdaptedLayer]]:
    """The layers that add to a parameter, by its identity; experts in a stack may have several."""
    found: dict[int, list[AdaptedLayer]] = {}
    for part in module.modules():
        factors: list[Any] = [getattr(part, name, ()) for name in ("lora_A", "lora_embedding_A")]
        if hasattr(part, "get_delta_weight") and any(adapter in each for each in factors):
            layer = cast("AdaptedLayer", part)
            weight = getattr(layer.get_base_layer(), getattr(part, "parameter_name", "weight"))
            found.setdefault(id(weight), []).append(layer)
    return found


def _part(added: Tensor, shard: Shard) -> Tensor:
    """What is added to this shard, of what is added to the whole tensor."""
    if not isinstance(added, DTensor):
        return added[shard.spec.box.relative_to(shard.spec.box.full(shard.spec.global_shape))]
    whole = None if shard.live is None else shard.live.tensor
    if not isinstance(whole, DTensor):
        raise LayoutError(f"{shard.spec.name}: its adapter is sharded, and it is not")
    mesh, placements = whole.device_mesh, whole.placements
    held = held_boxes(
        shard.spec.name,
        shard.spec.global_shape,
        tuple(mesh.shape),
        tuple(placements),
        tuple(mesh.get_coordinate() or ()),
    )
    slices = next(slices for box, slices in held if box == shard.spec.box)
    return added.redistribute(mesh, placements).to_local()[slices]
