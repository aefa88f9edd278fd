"""A layout cut as a person would say it: ``fsdp=8`` or ``tp=2,replicas=4``. For planning ahead.

Real layouts come from real ranks; this is for asking what a transfer would cost before there are
any. Needs no torch.
"""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from operator import itemgetter

import numpy as np

from cosmos_weightsync.errors import ConfigurationError
from cosmos_weightsync.layout import MAX_RANKS, Geometry, IntArray, Layout, TensorEntry

__all__ = ["cut_layout", "parse_cut"]

AXES = ("replicas", "fsdp", "tp")
COLUMN_CUT = ("*o_proj*", "*down_proj*", "*.wo.*", "*.w2.*")
"""Matrices whose input dim tensor parallelism cuts; of all others it cuts the output dim."""


def parse_cut(text: str) -> dict[str, int]:
    """``tp=2,replicas=4`` as numbers; axes that are not named are 1.

    Raises:
        ConfigurationError: it is not of that form, or is of too many ranks.
    """
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    for item in filter(None, (part.strip() for part in text.split(","))):
        axis, separator, size = item.partition("=")
        if axis not in sizes or not separator or not size.isdecimal() or int(size) < 1:
            raise ConfigurationError(
                f"{item!r}: write {' or '.join(f'{name}=N' for name in AXES)}, with commas between"
            )
        sizes[axis] = int(size)
    if math.prod(sizes.values()) > MAX_RANKS:
        raise ConfigurationError(f"{text!r}: more than {MAX_RANKS} ranks")
    return sizes


def cut_layout(whole: Layout, sizes: Mapping[str, int]) -> Layout:
    """Every tensor of a layout, cut anew over ``replicas * fsdp * tp`` ranks.

    Tensor parallelism cuts matrices by rows (by columns where the name says output or down
    projection) and leaves vectors whole; FSDP then cuts what is left by rows. Uneven cuts are
    those of `torch.chunk`.

    Raises:
        ConfigurationError: a degree is longer than any dim that it cuts.
    """
    alike: dict[tuple[tuple[int, ...], int], list[str]] = {}
    for name in whole.tensors:
        shape = whole.shape_of(name)
        alike.setdefault((shape, _tensor_dim(name, shape)), []).append(name)
    _check_degrees(alike, sizes)
    index: dict[bytes, int] = {}
    geometries: list[Geometry] = []
    cut_of: dict[str, int] = {}
    for (shape, dim), names in alike.items():
        geometry = _geometry(shape, dim, sizes)
        if not len(geometry.ranks):
            continue
        number = index.setdefault(geometry.key(), len(geometries))
        if number == len(geometries):
            geometries.append(geometry)
        cut_of.update(dict.fromkeys(names, number))
    tensors = {
        name: TensorEntry(entry.dtype, cut_of[name])
        for name, entry in whole.tensors.items()
        if name in cut_of
    }
    return Layout(math.prod(sizes.values()), tensors, tuple(geometries))


def _tensor_dim(name: str, shape: tuple[int, ...]) -> int:
    """The dim that tensor parallelism cuts; -1 of what it leaves whole."""
    if len(shape) < 2:
        return -1
    by_columns = any(fnmatchcase(name, pattern) for pattern in COLUMN_CUT)
    return len(shape) - 1 if by_columns else len(shape) - 2


def _check_degrees(
    alike: Mapping[tuple[tuple[int, ...], int], Sequence[str]], sizes: Mapping[str, int]
) -> None:
    """Refuse degrees of which some ranks would have no part of anything."""
    by_rows = [(shape[0], names[0]) for (shape, _), names in alike.items() if shape]
    by_dim = [(shape[dim], names[0]) for (shape, dim), names in alike.items() if dim >= 0]
    for axis, found in (("fsdp", by_rows), ("tp", by_dim)):
        most, name = max(found, key=itemgetter(0), default=(1, "nothing"))
        if sizes[axis] > max(most, 1):
            raise ConfigurationError(
                f"{axis}={sizes[axis]}: no tensor can be cut into so many parts, the longest dim "
                f"that it cuts has {most} ({name})"
            )


def _geometry(shape: tuple[int, ...], dim: int, sizes: Mapping[str, int]) -> Geometry:
    """The boxes of all ranks: replica by replica, of each first all of the first FSDP rank."""
    fsdp, tp = (axis.ravel() for axis in np.indices((sizes["fsdp"], sizes["tp"])))
    starts = np.zeros((len(tp), len(shape)), dtype=np.int64)
    stops = np.tile(np.array(shape, dtype=np.int64), (len(tp), 1))
    if dim >= 0:
        _chunk((starts, stops), dim, tp, sizes["tp"])
    if shape:
        _chunk((starts, stops), 0, fsdp, sizes["fsdp"])
    ranks = np.flatnonzero((starts < stops).all(axis=1) & (bool(shape) | (fsdp == 0)))
    replicas = sizes["replicas"]
    return Geometry(
        shape=shape,
        ranks=(np.arange(replicas)[:, None] * len(tp) + ranks).ravel(),
        starts=np.tile(starts[ranks], (replicas, 1)),
        stops=np.tile(stops[ranks], (replicas, 1)),
    )


def _chunk(boxes: tuple[IntArray, IntArray], dim: int, index: IntArray, count: int) -> None:
    """Leave of each box its ``index``-th of ``count`` parts along a dim."""
    starts, stops = boxes[0][:, dim], boxes[1][:, dim]
    extent = stops - starts
    step = -(-extent // count)
    stops[:] = starts + np.minimum((index + 1) * step, extent)
    starts += np.minimum(index * step, extent)
