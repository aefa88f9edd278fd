"""A layout cut as a person would say it: ``fsdp=8`` or ``tp=2,replicas=4``. For planning ahead.

Real layouts come from real ranks; this is for asking what a transfer would cost before there are
any. Needs no torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import itemgetter

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.errors import ConfigurationError
from cosmos_weightsync.layout import MAX_RANKS, Layout, ShardSpec, TensorEntry

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
    one_replica = [
        [
            ShardSpec(names[0], shape, box, whole.tensors[names[0]].dtype)
            for (shape, dim), names in alike.items()
            for box in _held(shape, dim, (fsdp, tp), sizes)
        ]
        for fsdp in range(sizes["fsdp"])
        for tp in range(sizes["tp"])
    ]
    cut = Layout.from_ranks(one_replica * sizes["replicas"])
    first_of = {name: names[0] for names in alike.values() for name in names}
    tensors = {
        name: TensorEntry(entry.dtype, cut.tensors[first_of[name]].geometry)
        for name, entry in whole.tensors.items()
        if first_of[name] in cut.tensors
    }
    return Layout(cut.num_ranks, tensors, cut.geometries)


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


def _held(
    shape: tuple[int, ...], dim: int, index: tuple[int, int], sizes: Mapping[str, int]
) -> Iterator[Box]:
    box = Box.full(shape)
    if dim >= 0:
        box = _chunk(box, dim, index[1], sizes["tp"])
    if shape:
        box = _chunk(box, 0, index[0], sizes["fsdp"])
    elif index[0]:
        return
    if not box.is_empty:
        yield box


def _chunk(box: Box, dim: int, index: int, count: int) -> Box:
    extent = box.stop[dim] - box.start[dim]
    step = -(-extent // count)
    low = box.start[dim] + min(index * step, extent)
    high = box.start[dim] + min((index + 1) * step, extent)
    return Box(
        (*box.start[:dim], low, *box.start[dim + 1 :]),
        (*box.stop[:dim], high, *box.stop[dim + 1 :]),
    )
