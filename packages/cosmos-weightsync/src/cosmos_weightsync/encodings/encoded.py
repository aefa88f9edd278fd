"""Shards as they are published: each under the first encoding whose names match it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor

from cosmos_weightsync.encodings.amax import (
    AmaxGroup,
    BlockMaxima,
    BlockRules,
    CutBlocks,
    check_finite,
)
from cosmos_weightsync.encodings.blocks import block_maxima
from cosmos_weightsync.encodings.cast import Cast
from cosmos_weightsync.encodings.contract import Encoding, Extents
from cosmos_weightsync.encodings.one_pass import has_one_pass, quantise_in_one_pass
from cosmos_weightsync.errors import EncodingError
from cosmos_weightsync.followed import FollowedTensors
from cosmos_weightsync.layout import ShardSpec
from cosmos_weightsync.living import check_in_place
from cosmos_weightsync.shards import Shard, handed_over

__all__ = ["EncodedShards", "encode"]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One live shard, its encoding, and where its tensors are in the published ones."""

    shard: Shard
    encoding: Encoding
    first: int
    num_tensors: int
    blocks: tuple[Extents, ...]


class EncodedShards:
    """What one rank publishes; made by `encode`, given to `WeightSender`.

    Attributes:
        specs: What receivers see and get, in order.
        hollow: What they see of tensors that have no element.
        is_cuda: Whether live values lie on a CUDA device.
    """

    def __init__(
        self, shards: Sequence[Shard], encodings: Sequence[Encoding], group: AmaxGroup | None
    ) -> None:
        self._encodings = tuple(encodings)
        for encoding in self._encodings:
            if isinstance(encoding.names, str):
                raise EncodingError(
                    f"names of an encoding are several patterns: ({encoding.names!r},)"
                )
        self._entries: list[_Entry] = []
        specs: list[ShardSpec] = []
        hollow: list[ShardSpec] = []
        for shard in shards:
            encoding = self._encoding_of(shard.spec.name)
            if shard.spec.is_hollow:
                cast = encoding if isinstance(encoding, Cast) else _AS_IS
                hollow.extend(cast.published(shard.spec))
            if shard.spec.box.is_empty:
                continue
            found = encoding.published(shard.spec)
            blocks = encoding.blocks(shard.spec)
            self._entries.append(_Entry(shard, encoding, len(specs), len(found), blocks))
            specs.extend(found)
        self._cast = [entry for entry in self._entries if isinstance(entry.encoding, Cast)]
        self._encoded = [e for e in self._entries if not isinstance(e.encoding, Cast)]
        # A group's ranks agree before any of them writes that none has an infinity.
        self._once: list[_Entry] = []
        self._twice: list[_Entry] = []
        for entry in self._encoded:
            is_once = group is None and has_one_pass(entry.encoding, entry.shard)
            (self._once if is_once else self._twice).append(entry)
        self.specs, self.hollow = tuple(specs), tuple(hollow)
        self.is_cuda = any(entry.shard.tensor.is_cuda for entry in self._entries)
        self._cut_blocks = CutBlocks(
            BlockRules(self._blocks, self._together), [e.shard.spec for e in self._entries], group
        )
        _check_names(self._entries, self.specs)

    def check_in_place(self) -> None:
        """Refuse to publish memory that the model has left.

        Raises:
            LayoutError: names the first tensor that lies elsewhere now.
        """
        check_in_place(entry.shard for entry in self._entries)

    def prepare(
        self, *, spoils: bool = False
    ) -> Callable[[Sequence[Tensor], FollowedTensors | None], None]:
        """Look at the shards as they are now; what is returned writes them, as `write` does.

        With an `AmaxGroup`, all its ranks call this together.

        Args:
            spoils: What is returned may find values that cannot be encoded as it writes, and leave
                the tensors spoiled: on a GPU FP8 then takes one pass over its memory.

        Raises:
            EncodingError: values cannot be encoded; nothing was written yet.
        """
        once, entries = (self._once, self._twice) if spoils else ([], self._encoded)
        with torch.no_grad():
            maxima = [
                [BlockMaxima(e.shard, b, _maxima_of(e.shard, b)) for b in e.blocks] for e in entries
            ]
        self._cut_blocks.complete([item for items in maxima for item in items])
        grids = [[item.grid for item in items] for items in maxima]
        return partial(self._write, list(zip(entries, grids, strict=True)), once)

    def write(self, tensors: Sequence[Tensor], followed: FollowedTensors | None = None) -> None:
        """Encode the shards as they are now.

        With an `AmaxGroup`, all its ranks call this together.

        Args:
            tensors: One contiguous tensor for each of `specs`.
            followed: Fills the tensors, or is told that they are full.

        Raises:
            EncodingError: values cannot be encoded; the tensors are as they were.
        """
        self.prepare()(tensors, followed)

    def _write(
        self,
        measured: Sequence[tuple[_Entry, Sequence[Tensor]]],
        once: Sequence[_Entry],
        tensors: Sequence[Tensor],
        followed: FollowedTensors | None,
    ) -> None:
        copier = None if self.is_cuda else followed
        with torch.no_grad():
            if copier is not None:
                cast = [entry.shard.tensor for entry in self._cast]
                copier.copy([entry.first for entry in self._cast], cast)
            else:
                for entry in self._cast:
                    entry.encoding.write(entry.shard, [], _into(entry, tensors))
            for entry, maxima in measured:
                entry.encoding.write(entry.shard, maxima, _into(entry, tensors))
            check_finite([_in_one_pass(entry, _into(entry, tensors)) for entry in once])
        devices = {e.shard.tensor.device for e in self._entries if e.shard.tensor.is_cuda}
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        if followed is not None:
            for entry in self._entries if copier is None else self._encoded:
                for index in range(entry.first, entry.first + entry.num_tensors):
                    followed.written(index)

    def _encoding_of(self, name: str) -> Encoding:
        for encoding in self._encodings:
            if any(fnmatchcase(name, pattern) for pattern in encoding.names):
                return encoding
        return _AS_IS

    def _blocks(self, spec: ShardSpec) -> tuple[Extents, ...]:
        return self._encoding_of(spec.name).blocks(spec)

    def _together(self, spec: ShardSpec) -> tuple[str, ...]:
        return self._encoding_of(spec.name).together(spec)


_AS_IS = Cast(dtype="")


def _into(entry: _Entry, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors[entry.first : entry.first + entry.num_tensors]


def encode(
    shards: Iterable[Shard], encodings: Sequence[Encoding], *, group: AmaxGroup | None = None
) -> EncodedShards:
    """Publish shards in less than all their bits.

    Args:
        shards: What this rank holds, from `shards_of`.
        encodings: The first whose names match a tensor applies to it; one that no encoding
            matches is sent as it is in memory.
        group: The ranks whose shards together make whole blocks, where a shard cuts one. The
            bytes of every block are then those that a rank with the whole tensor would send.

    Raises:
        EncodingError: a tensor has no blocks, or a shard cuts one and no group is given; or names
            are one string, whose letters would be the patterns.
        LayoutError: something else than shards with memory is given.

    Example:
        >>> encoded = encode(
        ...     shards_of(model), [BlockFp8(names=("*_proj.weight",)), Cast(dtype="bfloat16")]
        ... )
        >>> sender = WeightSender(encoded, rank=rank, num_ranks=num_ranks)
    """
    return EncodedShards(handed_over(shards, (Shard,)), encodings, group)


def _in_one_pass(entry: _Entry, into: Sequence[Tensor]) -> BlockMaxima:
    (block,) = entry.blocks
    return BlockMaxima(entry.shard, block, quantise_in_one_pass(entry.shard, block, into))


def _maxima_of(shard: Shard, block: Extents) -> Tensor:
    return block_maxima(shard.tensor, shard.spec.box, block)


def _check_names(entries: Sequence[_Entry], specs: Sequence[ShardSpec]) -> None:
    """No scale may take the name of another tensor of the model."""
    owners: dict[str, str] = {}
    for entry in entries:
        source = entry.shard.spec.name
        for spec in specs[entry.first : entry.first + entry.num_tensors]:
            owner = owners.setdefault(spec.name, source)
            if owner != source:
                raise EncodingError(f"{spec.name}: both {owner} and {source} publish this name")
