"""From the trainer's names and shapes to the checkpoint's, by running a converter once on nothing.

A converter is any function from a dict of tensors to a dict of tensors that renames, cuts and
rearranges them, and at last may join them: torchtitan's ``adapter.to_hf``, or three lines that take
a fused weight apart. It is run over meta tensors of the full shapes, which hold no bytes; what it
does to their indices is read off from strides. The result is described with views of the live
shards, so nothing is ever gathered, and converting costs nothing when a version is published.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.errors import LayoutError
from cosmos_weightsync.layout import IntArray, ShardSpec
from cosmos_weightsync.shards import (
    Shard,
    Source,
    clean_name,
    items_of,
    live_tensors,
    shards_of_live,
)

__all__ = ["Converter", "Origin", "converted_shards", "trace"]

Converter = Callable[[dict[str, Any]], Mapping[str, Any]]
_COPIES = ("aten::clone", "aten::contiguous", "aten::_to_copy", "aten::reshape", "aten::copy")
_NUM_SAMPLES = 64


class _Tracing(TorchDispatchMode):
    """Lets views through and notes of every copy what it is a copy of."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[int, Tensor] = {}
        self.joined: dict[int, tuple[list[Tensor], int]] = {}
        self.kept: list[Tensor] = []  # So that no storage is freed and its number used again.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch calls this for every operation."""
        name = func.name().partition(".")[0]
        if name == "aten::_unsafe_view":
            return torch.ops.aten.view.default(*args)
        result = func(*args, **(kwargs or {}))
        if name == "aten::cat":
            dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
            self.joined[_storage(result)] = (list(args[0]), dim % result.ndim)
            self.kept += [result, *args[0]]
        if name in _COPIES:
            source: Tensor = args[0]
            if result.dtype == source.dtype:
                result = torch.empty(source.shape, dtype=source.dtype, device="meta")
                self.copies[_storage(result)] = source
                self.kept += [source, result]
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True)
class _Run:
    """Indices ``low:high`` of a dim of the result; each step there is ``step`` in ``dim``.

    ``dim`` is -1 where the run is a single index.
    """

    low: int
    high: int
    dim: int
    step: int


def converted_shards(
    source: Source, convert: Converter, *, tied: Literal["once", "each"] = "once"
) -> tuple[Shard, ...]:
    """What this rank holds, by the names and shapes that a converter gives it.

    Args:
        source: A module, the modules of this rank's pipeline stages, or (name, tensor) pairs;
            a state dict is pairs too.
        convert: Called once, with a meta tensor of the full shape for every name; with modules,
            after their state-dict hooks.
        tied: As in `shards_of`.

    Raises:
        LayoutError: the converter computes a tensor or casts it, instead of cutting and rearranging
            one, or does more with several than to join them at last (``torch.cat``).

    Example:
        >>> adapter = Qwen3StateDictAdapter(config, None)  # torchtitan's
        >>> shards = converted_shards(model_parts, adapter.to_hf)
        >>> fused = lambda held: {"q": held["qkv"][:64], "k": held["qkv"][64:80]}
        >>> shards = converted_shards([("qkv", weight)], fused)
    """
    items = list(items_of(source))
    modules = [item for item in items if isinstance(item, nn.Module)]
    pairs = [item for item in items if not isinstance(item, nn.Module)]
    tensors = {
        live.name: live for part in (modules, pairs) for live in live_tensors(part, tied=tied)
    }
    held = {name: list(shards_of_live(live)) for name, live in tensors.items()}
    kinds = {name: (tuple(live.tensor.shape), live.tensor.dtype) for name, live in tensors.items()}
    return tuple(
        view
        for origin in trace(kinds, lambda held: convert(_saved(modules, held)))
        for shard in held[origin.root]
        for view in origin.views_of(shard)
    )


def _saved(modules: Sequence[nn.Module], held: dict[str, Any]) -> dict[str, Any]:
    """What the modules' own hooks make of a state dict before a converter sees it.

    torchtitan's fused QKV takes itself apart in such a hook. Only public ones are run: those of
    wrappers gather.
    """
    for module in modules:
        for name, child in module.named_modules():
            prefix = f"{clean_name(name)}." if name else ""
            for hook in vars(child)["_state_dict_hooks"].values():
                if getattr(hook, "_from_public_api", False):
                    hook(child, held, prefix, {})
    return held


def trace(
    kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]], convert: Converter
) -> list["Origin"]:
    """Run a converter over tensors of these shapes and dtypes that hold nothing.

    Raises:
        LayoutError: as `converted_shards`.
    """
    roots = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in kinds.items()
    }
    names = {_storage(tensor): name for name, tensor in roots.items()}
    tracing = _Tracing()
    with tracing, torch.no_grad():
        converted = dict(convert(dict(roots)))
    origins: list[Origin] = []
    for name, result in converted.items():
        for part, place in _parts(result, tracing):
            origin = Origin(name, part, tracing.copies, names, place)
            if part.dtype != roots[origin.root].dtype:
                raise LayoutError(f"{name}: the converter casts it; senders cast, by 'wire_dtype'")
            origin.look_up(kinds[origin.root][0])
            origins.append(origin)
    return origins


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a part of a joined tensor begins, and the shape of the whole."""

    start: tuple[int, ...]
    whole: tuple[int, ...]


def _parts(result: Any, tracing: _Tracing) -> Iterator[tuple[Any, _Place | None]]:
    """Take apart what was joined and left so."""
    joined = tracing.joined.get(_storage(result)) if isinstance(result, Tensor) else None
    if joined is None:
        yield result, None
        return
    parts, dim = joined
    whole = list(parts[0].shape)
    whole[dim] = sum(part.shape[dim] for part in parts)
    is_left_so = tuple(whole) == tuple(result.shape) and result.is_contiguous()
    if not is_left_so or any(part.dtype != result.dtype for part in parts):
        yield result, None  # refused, as what is made of several
        return
    low = 0
    for part in parts:
        start = [0] * len(whole)
        start[dim] = low
        low += part.shape[dim]
        yield part, _Place(tuple(start), tuple(whole))


class Origin:
    """Where the elements of one result, or of one part of it, come from."""

    def __init__(
        self,
        name: str,
        result: Any,
        copies: Mapping[int, Tensor],
        names: Mapping[int, str],
        place: _Place | None,
    ) -> None:
        if not isinstance(result, Tensor):
            raise LayoutError(f"{name}: the converter made a {type(result).__name__} of it")
        self.name = name
        self.shape = tuple(result.shape)
        self._place = place or _Place((0,) * len(self.shape), self.shape)
        self._chain = [result]
        while _storage(self._chain[-1]) in copies:
            self._chain.append(copies[_storage(self._chain[-1])])
        root = names.get(_storage(self._chain[-1]))
        if root is None:
            raise LayoutError(
                f"{name}: the converter computes it, or makes it of several tensors; only what is "
                "cut out of one tensor and rearranged can be sent as it lies, and what joins such "
                "parts by torch.cat at last"
            )
        self.root = root
        self._tables: list[IntArray] = []
        self._start = np.zeros(0, dtype=np.int64)

    def views_of(self, shard: Shard) -> Iterator[Shard]:
        """The parts of the result that this shard holds."""
        if shard.spec.box.is_empty or 0 in self.shape:
            return
        runs = [_runs(table) for table in self._tables]
        for block in product(*runs):
            for part in _one_each(block):
                yield from self._view(shard, part)

    def look_up(self, root_shape: tuple[int, ...]) -> None:
        """Follow every dim by itself, and make sure that the dims do not depend on each other."""
        zero = [np.zeros(1, dtype=np.int64)] * len(self.shape)
        self._start = self._coordinates(zero, root_shape)[0]
        if 0 in self.shape:
            return
        for dim, extent in enumerate(self.shape):
            along = [np.zeros(extent, dtype=np.int64)] * len(self.shape)
            along[dim] = np.arange(extent, dtype=np.int64)
            self._tables.append(self._coordinates(along, root_shape))
        draw = np.random.default_rng(0)
        sample = [draw.integers(0, extent, _NUM_SAMPLES) for extent in self.shape]
        moves = [
            table[index] - self._start for table, index in zip(self._tables, sample, strict=True)
        ]
        if not np.array_equal(self._start + sum(moves), self._coordinates(sample, root_shape)):
            raise LayoutError(
                f"{self.name}: the converter mixes the dims of {self.root} in a way that is no box"
            )

    def _coordinates(self, index: Sequence[IntArray], root_shape: tuple[int, ...]) -> IntArray:
        """Row i: where element i of the result lies in the root."""
        count = len(index[0]) if index else 1
        for depth, tensor in enumerate(self._chain):
            offset = np.full(count, tensor.storage_offset(), dtype=np.int64)
            for one, stride in zip(index, tensor.stride(), strict=True):
                offset += one * stride
            is_root = depth == len(self._chain) - 1
            shape = root_shape if is_root else tuple(self._chain[depth + 1].shape)
            if not shape:
                return np.zeros((count, 0), dtype=np.int64)
            index = [np.asarray(one, dtype=np.int64) for one in np.unravel_index(offset, shape)]
        return np.stack(index, axis=1)

    def _view(self, shard: Shard, block: tuple[_Run, ...]) -> Iterator[Shard]:
        """The part of a block that lies in a shard; a block is a box of the result."""
        origin = self._start.copy()
        for table, run in zip(self._tables, block, strict=True):
            origin += table[run.low] - self._start
        box = shard.spec.box
        index: list[slice | int] = [
            int(at) - low for at, low in zip(origin, box.start, strict=True)
        ]
        inside: list[bool] = [
            bool(low <= at < high)
            for at, low, high in zip(origin, box.start, box.stop, strict=True)
        ]
        low, high = [run.low for run in block], [run.high for run in block]
        for dim, run in enumerate(block):
            if run.dim < 0:
                continue
            first = max(0, -(-(box.start[run.dim] - int(origin[run.dim])) // run.step))
            last = min(
                run.high - run.low,
                -(-(box.stop[run.dim] - int(origin[run.dim])) // run.step),
            )
            inside[run.dim] = first < last
            at = int(origin[run.dim]) - box.start[run.dim]
            index[run.dim] = slice(at + first * run.step, at + last * run.step, run.step)
            low[dim], high[dim] = run.low + first, run.low + last
        if not all(inside):
            return
        view = shard.tensor[tuple(index)]
        driven = [run.dim for run in block if run.dim >= 0]
        view = view.permute([sorted(driven).index(dim) for dim in driven])
        for dim, run in enumerate(block):
            if run.dim < 0:
                view = view.unsqueeze(dim)
        inside_whole = Box(
            tuple(at + one for at, one in zip(self._place.start, low, strict=True)),
            tuple(at + one for at, one in zip(self._place.start, high, strict=True)),
        )
        spec = ShardSpec(self.name, self._place.whole, inside_whole, shard.spec.dtype)
        yield Shard(spec, view, shard.live)


def _one_each(block: tuple[_Run, ...]) -> Iterator[tuple[_Run, ...]]:
    """Where two dims walk along the same dim of the root, take the first index by index."""
    driven = [run.dim for run in block if run.dim >= 0]
    clash = next(
        (i for i, run in enumerate(block) if run.dim >= 0 and driven.count(run.dim) > 1), -1
    )
    if clash < 0:
        yield block
        return
    for index in range(block[clash].low, block[clash].high):
        single = _Run(index, index + 1, -1, 0)
        yield from _one_each((*block[:clash], single, *block[clash + 1 :]))


def _runs(table: IntArray) -> list[_Run]:
    """Cut a dim where it stops walking evenly along one dim of the root."""
    steps = np.diff(table, axis=0)
    is_walk = (np.count_nonzero(steps, axis=1) == 1) & (steps.max(axis=1, initial=0) > 0)
    turns = np.flatnonzero(np.any(steps[1:] != steps[:-1], axis=1))
    edges = [0]
    while edges[-1] < len(table):
        at = edges[-1]
        if at >= len(steps) or not is_walk[at]:
            edges.append(at + 1)
            continue
        after = np.searchsorted(turns, at)
        edges.append(int(turns[after]) + 2 if after < len(turns) else len(table))
    return [_run(low, high, steps) for low, high in pairwise(edges)]


def _run(low: int, high: int, steps: IntArray) -> _Run:
    if high - low == 1:
        return _Run(low, high, -1, 0)
    dim = int(np.argmax(steps[low]))
    return _Run(low, high, dim, int(steps[low, dim]))
