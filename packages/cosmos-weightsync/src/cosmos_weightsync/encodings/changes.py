"""What changed between two versions of the same bytes: where, and the new values; lossless.

After a step at a usual learning rate most bfloat16 weights round to what they were, so a list of
the others is short. One record stands for one run of elements ("chunk"):

```
kind, gap width, number of values, bytes of gaps, bytes of values | gaps | values
```
*same* is the kind alone; *dense* has all elements as they are, where a list would be longer;
*sparse* has gaps between changed elements (one or two bytes; the largest number means "so many
skipped, nothing changed here") and the new elements, byte plane by byte plane, both compressed by
zstd.

Values are compared and stored as bits: NaN payloads and the sign of zero survive. They overwrite
rather than add, so applying a record twice is applying it once.

What either side takes on the way is `WORK_PER_BYTE` times the chunk at most, whoever sends: lists
that would be longer than the chunk are neither written nor read.
"""

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from cosmos_weightsync.errors import ProtocolError

__all__ = [
    "RECORD_HEAD_BYTES",
    "WORK_PER_BYTE",
    "ChangeDecoder",
    "ChangeEncoder",
    "Dense",
    "Same",
    "Sparse",
]

Bytes = npt.NDArray[np.uint8]
_HEADER = struct.Struct("<BBIII")
_SAME, _SPARSE, _DENSE = 0, 1, 2
_MAX_NUMEL = 1 << 31
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SHORT_GAP = 32
"""Gaps of up to about this length on average are shorter in one byte than in two."""

RECORD_HEAD_BYTES = _HEADER.size
"""A record is so much longer than its chunk at most."""
WORK_PER_BYTE = 10
"""Bytes of memory that a byte of a chunk costs while it is compared, or a record is applied."""


@dataclass(frozen=True, slots=True)
class Same:
    """Nothing changed."""


@dataclass(frozen=True, slots=True)
class Dense:
    """All elements, as bytes."""

    content: Bytes


@dataclass(frozen=True, eq=False, slots=True)
class Sparse:
    """The elements that changed: where, in rising order, and their new bytes."""

    positions: npt.NDArray[np.int32]
    values: Bytes


class ChangeEncoder:
    """Compares chunks and writes records. Used by one thread.

    Args:
        level: Of zstd; 1 is several GB/s of model bytes.
    """

    def __init__(self, level: int = 1) -> None:
        self._zstd = zstandard.ZstdCompressor(level=level)

    def encode(self, new: Bytes, base: Bytes, item_bytes: int) -> list[bytes | Bytes]:
        """The record of one chunk, in parts to be sent one after the other.

        Args:
            new: Its bytes now; a dense record refers to them.
            base: Its bytes in the version that the reader has; as many.
            item_bytes: Bytes per element.
        """
        numel = len(new) // item_bytes
        positions = _changed(new, base, item_bytes)
        if positions is not None:
            count = len(positions)
            if count == 0:
                return [bytes([_SAME])]
            width, gaps = _gaps(positions, numel)
            packed = self._zstd.compress(_planes(gaps.view(np.uint8), width))
            values = new.view(_UNSIGNED[item_bytes])[positions].view(np.uint8)
            stored = self._zstd.compress(_planes(values, item_bytes))
            if len(packed) + len(stored) < len(new):
                head = _HEADER.pack(_SPARSE, width, count, len(packed), len(stored))
                return [head, packed, stored]
        return [_HEADER.pack(_DENSE, 0, numel, 0, len(new)), new]


class ChangeDecoder:
    """Reads records. Used by one thread."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor()

    def decode(
        self, stream: Bytes, offset: int, numel: int, item_bytes: int
    ) -> tuple[Same | Dense | Sparse, int]:
        """The record at ``offset``, and the offset after it.

        Args:
            stream: Records, one after the other.
            offset: Where to read.
            numel: Elements of the chunk.
            item_bytes: Bytes per element.

        Raises:
            ProtocolError: this is no record of such a chunk.
        """
        if offset < len(stream) and stream[offset] == _SAME:
            return Same(), offset + 1
        body = offset + _HEADER.size
        if body > len(stream):
            raise ProtocolError(f"a record of changes ends in its header at byte {offset}")
        kind, width, count, gap_bytes, value_bytes = _HEADER.unpack_from(stream.data, offset)
        middle, end = body + gap_bytes, body + gap_bytes + value_bytes
        if end > len(stream):
            raise ProtocolError(f"a record of changes at byte {offset} leaves its frame")
        if kind == _DENSE and count == numel and value_bytes == numel * item_bytes:
            return Dense(stream[middle:end]), end
        is_list = count > 0 and _is_short(count, numel, item_bytes) and numel < _MAX_NUMEL
        if kind == _SPARSE and width in {1, 2} and is_list:
            most = count + numel // (256**width - 1) + 1
            gaps = self._unpacked(stream[body:middle], width, most * width).view(_UNSIGNED[width])
            values = self._unpacked(stream[middle:end], item_bytes, count * item_bytes)
            num_listed = int(np.count_nonzero(gaps != 256**width - 1))
            if num_listed != count or int(gaps.sum(dtype=np.int64)) + count > numel:
                raise ProtocolError(f"a record of {count} changes lists {num_listed}")
            if len(values) != count * item_bytes:
                raise ProtocolError(f"a record of {count} changes has {len(values)} bytes")
            return Sparse(_positions(gaps, width), values), end
        raise ProtocolError(f"a record of changes of kind {kind} does not fit {numel} elements")

    def _unpacked(self, packed: Bytes, item_bytes: int, at_most: int) -> Bytes:
        """Decompressed, and its byte planes put together again."""
        try:
            size = zstandard.frame_content_size(packed.data)
            if not 0 <= size <= at_most or size % item_bytes:
                raise ProtocolError(f"a record of changes says it holds {size} bytes")
            content = self._zstd.decompress(packed.data)
        except zstandard.ZstdError as error:
            raise ProtocolError(f"a record of changes cannot be decompressed: {error}") from error
        planes = np.frombuffer(content, dtype=np.uint8).reshape(item_bytes, -1)
        return np.array(planes.T, order="C").reshape(-1)


def _is_short(count: int, numel: int, item_bytes: int) -> bool:
    """Whether a list of so many changes can be shorter than what it stands for."""
    return count * (item_bytes + 1) < numel * item_bytes


def _changed(new: Bytes, base: Bytes, item_bytes: int) -> npt.NDArray[np.int32] | None:
    """Positions of the elements whose bits differ; ``None`` if they are too many for a list.

    Looks at eight bytes at a time first, which is faster as long as few of them differ.
    """
    unsigned, per_word = _UNSIGNED[item_bytes], 8 // item_bytes
    whole = len(new) // 8 * 8
    elements, before = new.view(unsigned), base.view(unsigned)
    differs = new[:whole].view(np.uint64) != base[:whole].view(np.uint64)
    if np.count_nonzero(differs) > len(differs) // 16:
        differs = elements != before
        if not _is_short(int(np.count_nonzero(differs)), len(elements), item_bytes):
            return None
        return np.flatnonzero(differs).astype(np.int32)
    words = np.flatnonzero(differs)
    inside = (words[:, None] * per_word + np.arange(per_word)).reshape(-1)
    rest = np.arange(whole // item_bytes, len(elements))
    candidates = np.concatenate([inside, rest])
    found = candidates[elements[candidates] != before[candidates]].astype(np.int32)
    return found if _is_short(len(found), len(elements), item_bytes) else None


def _gaps(positions: npt.NDArray[np.int32], numel: int) -> tuple[int, npt.NDArray[np.generic]]:
    """Width in bytes, and how many unchanged elements lie before each changed one."""
    width = 1 if numel < _SHORT_GAP * len(positions) else 2
    skip = 256**width - 1
    gaps = np.diff(positions, prepend=np.int32(-1))
    gaps -= 1
    if int(gaps.max()) < skip:
        return width, gaps.astype(_UNSIGNED[width])
    ends = gaps // skip
    ends += 1
    np.cumsum(ends, out=ends)
    entries = np.full(int(ends[-1]), skip, dtype=_UNSIGNED[width])
    ends -= 1
    gaps %= skip
    entries[ends] = gaps
    return width, entries


def _positions(gaps: npt.NDArray[np.generic], width: int) -> npt.NDArray[np.int32]:
    """The inverse of `_gaps`; the last position must fit."""
    is_change = gaps != 256**width - 1
    positions = np.cumsum(gaps, dtype=np.int32)[is_change]
    positions += np.arange(len(positions), dtype=np.int32)
    return positions


def _planes(values: Bytes, item_bytes: int) -> bytes:
    """All first bytes, all second bytes, …: like compresses with like."""
    if item_bytes == 1:
        return values.tobytes()
    return np.ascontiguousarray(values.reshape(-1, item_bytes).T).tobytes()
