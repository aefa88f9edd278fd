"""From tensors in memory to shards: plain tensors, modules, and DTensors of any placement."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.errors import LayoutError
from cosmos_weightsync.layout import ITEM_BYTES, IntArray, ShardSpec, keeps_meaning
from cosmos_weightsync.living import LiveTensor, live_parameter, live_tensor
from cosmos_weightsync.wrapped import check_kind, check_sharding, resharded, seen_through

__all__ = [
    "Shard",
    "Source",
    "cast_spec",
    "check_separate",
    "check_wire_dtype",
    "clean_name",
    "dtype_name",
    "handed_over",
    "held_boxes",
    "live_tensors",
    "shards_of",
    "shards_of_live",
    "torch_dtype",
]

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Name parts that wrappers put in (torch.compile, activation checkpointing, FSDP1)."""
_PAIR = 2
_DUE = "a module is due, modules, or pairs of name and tensor such as model.named_parameters()"


@dataclass(frozen=True, eq=False, slots=True)
class Shard:
    """One described part of a tensor, and the memory that holds it.

    Args:
        spec: What it is.
        tensor: A view of exactly the box, in the spec's dtype; strides are free.
        live: What it is a view of, to notice when that gets other memory.

    Raises:
        LayoutError: shape or dtype of the tensor are not those of the spec.
    """

    spec: ShardSpec
    tensor: Tensor
    live: LiveTensor | None = None

    def __post_init__(self) -> None:
        found = (tuple(self.tensor.shape), dtype_name(self.tensor.dtype))
        if found != (self.spec.box.shape, self.spec.dtype):
            raise LayoutError(
                f"{self.spec.name}: the tensor is {found[0]} {found[1]}, its spec says "
                f"{self.spec.box.shape} {self.spec.dtype}"
            )


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` is called ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The inverse of `dtype_name`.

    Raises:
        LayoutError: not the name of a dtype that can be moved.
    """
    if name not in ITEM_BYTES:
        raise LayoutError(f"dtype {name!r} is none of {sorted(ITEM_BYTES)}")
    return getattr(torch, name)


def check_wire_dtype(name: str) -> None:
    """Check that floating tensors can be cast to a dtype; empty is none.

    Raises:
        LayoutError: they cannot, or it is not the name of one.
    """
    if name and not keeps_meaning("float32", dtype_name(torch_dtype(name))):
        raise LayoutError(
            f"floating tensors are not cast to {name!r}, which has no room for their numbers; "
            "encodings make the quantised ones"
        )


def cast_spec(spec: ShardSpec, dtype: str) -> ShardSpec:
    """A floating tensor's spec in another dtype, of any other tensor as it is; empty is none.

    Exponents and packed numbers are none by themselves: they stay what they are.
    """
    is_floating = torch_dtype(spec.dtype).is_floating_point and keeps_meaning(spec.dtype, dtype)
    return replace(spec, dtype=dtype) if dtype and is_floating else spec


def check_separate(shard: Shard) -> None:
    """Refuse to receive into a tensor of which several elements share memory.

    Raises:
        LayoutError: it is one, as `expand` makes them.
    """
    sides = zip(shard.tensor.shape, shard.tensor.stride(), strict=True)
    if any(extent > 1 and stride == 0 for extent, stride in sides):
        raise LayoutError(
            f"{shard.spec.name}: several of its elements are one in memory, as after 'expand': "
            "nothing can be received into it"
        )


def clean_name(name: str) -> str:
    """A parameter's name without the parts that wrappers put in."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


Source = nn.Module | Sequence[nn.Module] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""A module; the modules of the pipeline stages on this rank; or tensors by name, or in pairs."""


def items_of(source: Source) -> Iterable[nn.Module | tuple[str, Tensor]]:
    """The modules, or the pairs, of a source.

    Raises:
        LayoutError: it is something else, such as ``model.parameters()``.
    """
    given: Any = source
    if isinstance(given, Mapping):
        return map(_checked, cast("Mapping[Any, Any]", given).items())
    if isinstance(given, nn.Module | Tensor | str):
        given = [given]
    if not isinstance(given, Iterable):
        raise LayoutError(f"{_DUE}, not {type(source).__name__}")
    return map(_checked, cast("Iterable[Any]", given))


def _checked(item: Any) -> nn.Module | tuple[str, Tensor]:
    if isinstance(item, nn.Module):
        return item
    if not (isinstance(item, tuple | list) and len(cast("Sequence[Any]", item)) == _PAIR):
        what = "tensors without names" if isinstance(item, Tensor) else type(item).__name__
        raise LayoutError(f"{_DUE}, not {what}")
    name, tensor = cast("Sequence[Any]", item)
    if not isinstance(name, str):
        raise LayoutError(f"{_DUE}; a name is {name!r}")
    if not isinstance(tensor, Tensor):
        raise LayoutError(f"{name}: a tensor is due, not {type(tensor).__name__}: leave it out")
    return name, tensor


def live_tensors(source: Source, *, tied: Literal["once", "each"] = "once") -> Iterator[LiveTensor]:
    """The parameters of a source by their clean names."""
    seen: dict[int, Tensor] = {}  # Kept, or the number of one that is gone is soon another's.
    for item in items_of(source):
        for live in _live_of(item):
            if tied == "each" or id(live.tensor) not in seen:
                seen[id(live.tensor)] = live.tensor
                yield live


def _live_of(item: nn.Module | tuple[str, Tensor]) -> Iterator[LiveTensor]:
    if not isinstance(item, nn.Module):
        name, tensor = item
        check_kind(name, tensor)
        yield live_tensor(clean_name(name), tensor)
        return
    check_sharding(item)
    name_of = seen_through(item)
    for path, parameter in resharded(item).named_parameters(remove_duplicate=False):
        check_kind(path, parameter)
        yield live_parameter(clean_name(name_of(path)), path, parameter, item)


def shards_of(source: Source, *, tied: Literal["once", "each"] = "once") -> tuple[Shard, ...]:
    """What this rank holds of the parameters of modules, or of (name, tensor) pairs.

    The shards are views: they follow the parameters as these are trained, and not into other
    memory; senders and receivers refuse shards whose parameters were given some since, by
    ``model.to`` or ``load_state_dict(assign=True)``. A DTensor gives the part on this rank, as
    several shards where it is interleaved; a plain tensor is taken as whole. Of modules, what FSDP2
    has gathered for a forward pass is given back first. Buffers are not included; pass pairs, or a
    state dict, to send them.

    Args:
        source: A module, all modules of this rank's pipeline stages, or pairs; in checkpoint
            names, or see `converted_shards`.
        tied: A parameter under two names is sent ``"once"``, under its first name, as a
            checkpoint would store it; ``"each"`` sends it under every name.

    Raises:
        LayoutError: a tensor has a dtype that cannot be moved, or a DTensor holds partial sums,
            or something has no name or is no tensor; FSDP1 or DeepSpeed has taken it apart.
    """
    return tuple(
        shard for live in live_tensors(source, tied=tied) for shard in shards_of_live(live)
    )


def handed_over(items: Any, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    """What somebody gives as shards, once it is seen that these are some.

    Args:
        items: What was given.
        kinds: What each of them may be.

    Raises:
        LayoutError: they are something else, or have tensors without memory.
    """
    given: Iterable[Any] = [items] if isinstance(items, nn.Module | Mapping) else items
    found = tuple(given)
    for item in found:
        if not isinstance(item, kinds):
            raise LayoutError(
                f"{' or '.join(kind.__name__ for kind in kinds)} is due, not "
                f"{type(item).__name__}: hand over shards_of(...)"
            )
        if isinstance(item, Shard) and item.tensor.is_meta:
            raise LayoutError(
                f"{item.spec.name}: its tensor is on the meta device and holds nothing: describe "
                "the model when it has memory, after 'to_empty'"
            )
    return found


def shards_of_live(live: LiveTensor) -> Iterator[Shard]:
    """What this rank holds of one tensor.

    Raises:
        LayoutError: as `shards_of`.
    """
    name, tensor = live.name, live.tensor.detach()
    shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
    if not isinstance(tensor, DTensor):
        yield Shard(ShardSpec(name, shape, Box.full(shape), dtype), tensor, live)
        return
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return
    mesh_shape = tuple(tensor.device_mesh.shape)
    local = tensor.to_local()
    boxes = held_boxes(name, shape, mesh_shape, tuple(tensor.placements), tuple(coordinate))
    for box, slices in boxes:
        yield Shard(ShardSpec(name, shape, box, dtype), local[slices], live)


def held_boxes(
    name: str,
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
) -> list[tuple[Box, tuple[slice, ...]]]:
    """Where the parts of a DTensor's local tensor lie in the full tensor.

    Follows, for every dim, which global indices the placements leave on this rank (mesh dims from
    left to right, each cut as by `torch.chunk`), and reads off the runs of consecutive ones.

    Returns:
        (box in the full tensor, slices in the local tensor) of every part; none when the local
        tensor is empty.
    """
    held = [np.arange(extent, dtype=np.int64) for extent in shape]
    for size, placement, index in zip(mesh_shape, placements, coordinate, strict=True):
        if isinstance(placement, Replicate):
            continue
        split_factor = getattr(placement, "split_factor", 1)
        if not (isinstance(placement, ShardPlacement) or hasattr(placement, "split_factor")):
            raise LayoutError(f"{name}: placement {placement} holds no part of the tensor")
        dim: int = placement.dim  # pyright: ignore[reportAttributeAccessIssue]
        held[dim] = _chunk_of(held[dim], int(split_factor), size, index)
    runs = [_runs(indices) for indices in held]
    return [
        (
            Box(tuple(r[0] for r in part), tuple(r[0] + r[2] for r in part)),
            tuple(slice(r[1], r[1] + r[2]) for r in part),
        )
        for part in product(*runs)
    ]


def _chunk_of(held: IntArray, split_factor: int, num_chunks: int, index: int) -> IntArray:
    """Chunk ``index`` of each of ``split_factor`` chunks; a plain shard has split factor 1."""
    parts = [_chunk(whole, num_chunks, index) for whole in _chunks(held, split_factor)]
    return np.concatenate(parts)


def _chunks(held: IntArray, num_chunks: int) -> list[IntArray]:
    return [_chunk(held, num_chunks, index) for index in range(num_chunks)]


def _chunk(held: IntArray, num_chunks: int, index: int) -> IntArray:
    size = -(-len(held) // num_chunks)
    return held[index * size : (index + 1) * size]


def _runs(indices: IntArray) -> list[tuple[int, int, int]]:
    """Runs of consecutive values as (first value, position, length)."""
    if len(indices) == 0:
        return []
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    edges = [0, *breaks.tolist(), len(indices)]
    return [(int(indices[low]), low, high - low) for low, high in pairwise(edges)]
