"""The safetensors format: 8 bytes of length, a JSON header, then the tensors' bytes.

Read and written here without the safetensors library, because only headers and byte ranges are
ever wanted, and because they may lie in an object store. Needs no torch.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cosmos_weightsync.errors import CorruptFileError, LayoutError
from cosmos_weightsync.layout import ITEM_BYTES

__all__ = ["MAX_HEADER_BYTES", "HeaderEntry", "decode_header", "encode_header", "header_bytes"]

MAX_HEADER_BYTES = 100 << 20
"""The limit of the format's own reader."""

_LENGTH = struct.Struct("<Q")
_CODES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_NAMES = {name: code for code, name in _CODES.items()}
_ALIGNMENT = 8
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file; ``offset`` counts from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        count = ITEM_BYTES[self.dtype]
        for extent in self.shape:
            count *= extent
        return count


def header_bytes(first: bytes, file: str) -> int:
    """How long the header is, from the first 8 bytes of a file.

    Raises:
        CorruptFileError: no safetensors file begins like this.
    """
    if len(first) < _LENGTH.size:
        raise CorruptFileError(f"{file}: {len(first)} bytes are no safetensors file")
    (length,) = _LENGTH.unpack(first[: _LENGTH.size])
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise CorruptFileError(f"{file}: a header of {length} bytes: not a safetensors file")
    return int(length)


def decode_header(text: bytes, file: str) -> tuple[tuple[HeaderEntry, ...], dict[str, str]]:
    """The tensors of a file, in the order of their bytes, and its metadata.

    Raises:
        CorruptFileError: the header is not one, an entry contradicts itself, or the tensors do not
            lie one after the other, as the format wants.
    """
    try:
        header = msgspec.json.decode(text)
        metadata = {str(k): str(v) for k, v in header.pop(_METADATA, {}).items()}
        entries = [_entry(str(name), item, file) for name, item in header.items()]
    except (
        msgspec.DecodeError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:
        raise CorruptFileError(f"{file}: the header is damaged: {error!r}") from error
    entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))
    end, before = 0, "the header"
    for entry in entries:
        if entry.offset != end:
            where = "overlaps" if entry.offset < end else "leaves a hole behind"
            raise CorruptFileError(
                f"{file}: {entry.name} begins at byte {entry.offset} and {where} {before}, which "
                f"ends at {end}"
            )
        end, before = end + entry.num_bytes, entry.name
    return tuple(entries), metadata


def _entry(name: str, item: Mapping[str, Any], file: str) -> HeaderEntry:
    dtype = _CODES.get(item["dtype"])
    if dtype is None:
        raise LayoutError(f"{file}: {name} has dtype {item['dtype']!r}, which cannot be moved")
    shape = [int(extent) for extent in item["shape"]]
    if dtype == "float4_e2m1fn_x2" and shape:
        shape[-1] //= 2  # The format counts numbers, torch the bytes that hold two.
    start, stop = (int(edge) for edge in item["data_offsets"])
    entry = HeaderEntry(name, dtype, tuple(shape), start)
    if min(shape, default=0) < 0 or start < 0 or stop - start != entry.num_bytes:
        raise CorruptFileError(
            f"{file}: {name} {dtype} {entry.shape} cannot lie in bytes {start}:{stop}"
        )
    return entry


def encode_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, tuple[HeaderEntry, ...]]:
    """The first bytes of a file that holds these (name, dtype, shape), one after the other.

    Raises:
        LayoutError: a tensor has the name that the format keeps for metadata.
    """
    if any(name == _METADATA for name, _, _ in tensors):
        raise LayoutError(f"{_METADATA}: no tensor of a safetensors file has this name: rename it")
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    entries: list[HeaderEntry] = []
    offset = 0
    for name, dtype, shape in tensors:
        entry = HeaderEntry(name, dtype, shape, offset)
        offset += entry.num_bytes
        counted = list(shape)
        if dtype == "float4_e2m1fn_x2" and counted:
            counted[-1] *= 2
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": counted,
            "data_offsets": [entry.offset, offset],
        }
        entries.append(entry)
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text, tuple(entries)
