"""What the ranks of one side hold: names, global shapes, dtypes and boxes; pure data.

A model has thousands of tensors but only a handful of distinct ways in which they are cut, so a
`Layout` stores each distinct cut (`Geometry`) once. Planning, JSON and digests all work on the
distinct cuts. Nothing here needs torch.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.errors import LayoutError

__all__ = [
    "ITEM_BYTES",
    "MAX_RANKS",
    "Geometry",
    "Layout",
    "ShardSpec",
    "TensorEntry",
    "check_cast",
    "check_once",
    "keeps_meaning",
]

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of every dtype that can be moved, by its torch name.

An element of ``float4_e2m1fn_x2`` is a byte that holds two numbers, as torch counts them.
"""

MAX_RANKS = 1 << 20
"""More than any machine has; what costs time or memory for each rank is refused beyond it."""
MAX_ELEMENTS = 1 << 59
"""Of one tensor: its bytes are then counted by 64 bits in any dtype."""

# that hold numbers of their own, where a scale beside them is no part of the number
_NUMBERS = frozenset(name for name in ITEM_BYTES if "float" in name) - {
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
}
IntArray = npt.NDArray[np.int64]


def keeps_meaning(source: str, target: str) -> bool:
    """Whether a tensor of one dtype may be cast to another.

    Floating ones may, with rounding; integers to wider ones alone. Bits that are no numbers by
    themselves, as those of packed or shared exponents, and truth stay what they are.
    """
    if source == target or {source, target} <= _NUMBERS:
        return True
    return "int" in source and "int" in target and np.can_cast(source, target, "safe")


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One rank's part of one tensor.

    Several specs of one rank may carry the same name: an interleaved shard is several boxes.

    Args:
        name: The tensor's name in the checkpoint.
        global_shape: The shape of the whole tensor.
        box: Which part this is.
        dtype: The dtype in memory, by torch name without the prefix: ``bfloat16``.

    Raises:
        LayoutError: the box sticks out of the tensor, the tensor is larger than any can be, or the
            dtype is not known.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise LayoutError(f"{self.name}: dtype {self.dtype!r} is none of {sorted(ITEM_BYTES)}")
        if len(self.box.start) != len(self.global_shape):
            raise LayoutError(f"{self.name}: box {self.box} in a tensor of {self.global_shape}")
        if not Box.full(self.global_shape).contains(self.box):
            raise LayoutError(f"{self.name}: box {self.box} leaves the shape {self.global_shape}")
        if max(math.prod(self.global_shape), *self.global_shape, 0) > MAX_ELEMENTS:
            raise LayoutError(
                f"{self.name} {self.global_shape}: no tensor has more than {MAX_ELEMENTS} elements"
            )

    @property
    def is_hollow(self) -> bool:
        """Whether the whole tensor has no element: all there is of it is its name and shape."""
        return 0 in self.global_shape

    @property
    def num_bytes(self) -> int:
        """Bytes of this part."""
        return self.box.numel * ITEM_BYTES[self.dtype]


def check_cast(wanted: ShardSpec, dtype: str, holder: str) -> None:
    """Refuse to cast a tensor into numbers of another kind; see `keeps_meaning`.

    Args:
        wanted: What it is to become.
        dtype: What it is.
        holder: Who has it: "sender rank 3 sends", "the files have".

    Raises:
        LayoutError: naming the tensor and its box.
    """
    if not keeps_meaning(dtype, wanted.dtype):
        raise LayoutError(
            f"{wanted.name} {wanted.box}: wanted here as {wanted.dtype}, {holder} {dtype}; "
            "floating tensors are cast, and integers to wider ones, but one is not the other"
        )


def check_once(specs: Iterable[ShardSpec], who: str) -> None:
    """Refuse specs of one rank that share an element.

    Args:
        specs: All of one rank.
        who: "receiver 0 wants", "sender rank 3 holds": begins the sentence of the error.

    Raises:
        LayoutError: an element is in two of them.
    """
    by_name: dict[str, list[Box]] = {}
    for spec in specs:
        if not spec.box.is_empty:
            by_name.setdefault(spec.name, []).append(spec.box)
    for name, boxes in by_name.items():
        starts = np.array([box.start for box in boxes], dtype=np.int64)
        stops = np.array([box.stop for box in boxes], dtype=np.int64)
        for index, box in enumerate(boxes[1:], start=1):
            low = np.maximum(starts[:index], starts[index])
            high = np.minimum(stops[:index], stops[index])
            for other in np.flatnonzero((low < high).all(axis=1)).tolist():
                shared = Box(tuple(low[other].tolist()), tuple(high[other].tolist()))
                raise LayoutError(f"{name}: {who} {shared} twice, in {boxes[other]} and in {box}")


@dataclass(frozen=True, eq=False, slots=True)
class Geometry:
    """One way to cut a tensor of ``shape`` over ranks: row i says ``ranks[i]`` holds box i."""

    shape: tuple[int, ...]
    ranks: IntArray
    starts: IntArray
    stops: IntArray

    @classmethod
    def from_boxes(cls, shape: tuple[int, ...], held: Sequence[tuple[int, Box]]) -> "Geometry":
        """From (rank, box) pairs; empty boxes are left out, the rest is sorted."""
        rows = sorted((rank, box) for rank, box in held if not box.is_empty)
        size = (len(rows), len(shape))
        return cls(
            shape=shape,
            ranks=np.array([rank for rank, _ in rows], dtype=np.int64),
            starts=np.array([box.start for _, box in rows], dtype=np.int64).reshape(size),
            stops=np.array([box.stop for _, box in rows], dtype=np.int64).reshape(size),
        )

    def boxes_of(self, rank: int) -> tuple[Box, ...]:
        """The boxes that ``rank`` holds."""
        rows = np.flatnonzero(self.ranks == rank)
        return tuple(
            Box(tuple(self.starts[row].tolist()), tuple(self.stops[row].tolist())) for row in rows
        )

    def key(self) -> bytes:
        """Equal for equal geometries, and only for those."""
        head = json.dumps([self.shape, len(self.ranks)]).encode()
        return head + self.ranks.tobytes() + self.starts.tobytes() + self.stops.tobytes()

    def to_json(self) -> dict[str, Any]:
        """Plain lists."""
        return {
            "shape": list(self.shape),
            "ranks": self.ranks.tolist(),
            "starts": self.starts.tolist(),
            "stops": self.stops.tolist(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Geometry":
        """The inverse of `to_json`; checks that every box lies inside the shape."""
        shape = tuple(_whole(data["shape"]).tolist())
        if min(shape, default=0) < 0 or math.prod(shape) > MAX_ELEMENTS:
            raise LayoutError(f"no tensor has the shape {shape}")
        size = (len(data["ranks"]), len(shape))
        geometry = cls(
            shape=shape,
            ranks=_whole(data["ranks"]),
            starts=_whole(data["starts"]).reshape(size),
            stops=_whole(data["stops"]).reshape(size),
        )
        inside = (geometry.starts >= 0) & (geometry.starts < geometry.stops)
        if not bool(np.all(inside & (geometry.stops <= np.array(shape, dtype=np.int64)))):
            raise LayoutError(f"a box leaves the shape {shape} or is empty")
        return geometry


def _whole(values: Any) -> IntArray:
    found = np.array(values)
    if found.size and found.dtype.kind != "i":
        raise LayoutError(f"whole numbers below 2**63 are due, not {values!r:.99}")
    return found.astype(np.int64)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a layout: its dtype and the index of its cut in `Layout.geometries`."""

    dtype: str
    geometry: int


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """All ranks of one side. Build it with `from_ranks`, `merge` or `from_json`.

    Attributes:
        num_ranks: How many ranks the side has; some may hold nothing.
        tensors: Every tensor by name, in the order in which it was described.
        geometries: The distinct cuts.
    """

    num_ranks: int
    tensors: Mapping[str, TensorEntry]
    geometries: tuple[Geometry, ...]

    @classmethod
    def from_ranks(cls, ranks: Sequence[Iterable[ShardSpec]]) -> "Layout":
        """From the specs of rank 0, 1, ...

        Raises:
            LayoutError: two ranks disagree about a tensor's shape or dtype.
        """
        held: dict[str, list[tuple[int, Box]]] = {}
        kinds: dict[str, tuple[tuple[int, ...], str]] = {}
        for rank, specs in enumerate(ranks):
            for spec in specs:
                kind = kinds.setdefault(spec.name, (spec.global_shape, spec.dtype))
                if kind != (spec.global_shape, spec.dtype):
                    raise LayoutError(
                        f"{spec.name}: rank {rank} says {spec.global_shape} {spec.dtype}, "
                        f"another rank says {kind[0]} {kind[1]}"
                    )
                held.setdefault(spec.name, []).append((rank, spec.box))
        cuts = ((name, kinds[name], tuple(boxes)) for name, boxes in held.items())
        return cls._deduplicated(len(ranks), cuts)

    @classmethod
    def _deduplicated(
        cls,
        num_ranks: int,
        cuts: Iterable[tuple[str, tuple[tuple[int, ...], str], tuple[tuple[int, Box], ...]]],
    ) -> "Layout":
        index: dict[object, int] = {}
        geometries: list[Geometry] = []
        tensors: dict[str, TensorEntry] = {}
        for name, (shape, dtype), held in cuts:
            key = (shape, held)
            if key not in index:
                index[key] = len(geometries)
                geometries.append(Geometry.from_boxes(shape, held))
            tensors[name] = TensorEntry(dtype, index[key])
        return cls(num_ranks, tensors, tuple(geometries))

    @classmethod
    def merge(cls, parts: Sequence["Layout"]) -> "Layout":
        """One side from the single-rank layouts of its ranks, in rank order."""
        return cls.from_ranks([(*part.specs_of(0), *part.hollow_specs()) for part in parts])

    def specs_of(self, rank: int) -> tuple[ShardSpec, ...]:
        """What one rank holds."""
        boxes = [geometry.boxes_of(rank) for geometry in self.geometries]
        return tuple(
            ShardSpec(name, self.geometries[entry.geometry].shape, box, entry.dtype)
            for name, entry in self.tensors.items()
            for box in boxes[entry.geometry]
        )

    def hollow_specs(self) -> tuple[ShardSpec, ...]:
        """The tensors that have no element anywhere, which no rank can hold a part of."""
        return tuple(spec for spec in self.full_specs() if spec.is_hollow)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The global shape of a tensor."""
        return self.geometries[self.tensors[name].geometry].shape

    def full_specs(self) -> tuple[ShardSpec, ...]:
        """Every tensor of this side whole, as a receiver of everything would describe it."""
        return tuple(
            ShardSpec(name, self.shape_of(name), Box.full(self.shape_of(name)), entry.dtype)
            for name, entry in self.tensors.items()
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON value; `from_json` reads it back."""
        return {
            "num_ranks": self.num_ranks,
            "geometries": [geometry.to_json() for geometry in self.geometries],
            "tensors": [[name, e.dtype, e.geometry] for name, e in self.tensors.items()],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Layout":
        """Read what `to_json` wrote.

        Raises:
            LayoutError: the value is not a layout.
        """
        try:
            geometries = tuple(Geometry.from_json(item) for item in data["geometries"])
            tensors = {
                str(name): TensorEntry(str(dtype), int(index))
                for name, dtype, index in data["tensors"]
            }
            num_ranks = int(_whole(data["num_ranks"]).item())
            num_names = len(data["tensors"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise LayoutError(f"not a layout: {error!r}") from error
        if not 0 <= num_ranks <= MAX_RANKS:
            raise LayoutError(f"{num_ranks} ranks are not between 0 and {MAX_RANKS}")
        if num_names != len(tensors):
            raise LayoutError(f"{num_names} tensors have {len(tensors)} different names")
        if any(((g.ranks < 0) | (g.ranks >= num_ranks)).any() for g in geometries):
            raise LayoutError(f"a box belongs to a rank outside 0..{num_ranks - 1}")
        for name, entry in tensors.items():
            if entry.dtype not in ITEM_BYTES or not 0 <= entry.geometry < len(geometries):
                raise LayoutError(f"{name}: unknown dtype or geometry in {entry}")
        return cls(num_ranks, tensors, geometries)

    def to_msgpack(self) -> bytes:
        """What `to_json` says, smaller and faster to read."""
        return msgspec.msgpack.encode(self.to_json())

    @classmethod
    def from_msgpack(cls, data: bytes) -> "Layout":
        """Read what `to_msgpack` wrote.

        Raises:
            LayoutError: the bytes are not a layout.
        """
        try:
            value = msgspec.msgpack.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LayoutError(f"not a layout: {error}") from error
        return cls.from_json(value)

    def digest(self) -> str:
        """16 bytes in hex; equal layouts, tensor order included, have equal digests."""
        state = hashlib.blake2b(digest_size=16)
        keys = [hashlib.blake2b(g.key(), digest_size=16).digest() for g in self.geometries]
        state.update(str(self.num_ranks).encode())
        for name, entry in self.tensors.items():
            state.update(json.dumps([name, entry.dtype]).encode())
            state.update(keys[entry.geometry])
        return state.hexdigest()
