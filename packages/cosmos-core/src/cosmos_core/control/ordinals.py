"""Ordinals of prompts in few bytes: those of a step are close together, most of them in a row.

What is kept is the first ordinal, then how many follow in a row, how many are left out, and so on
in turn: 5, 6, 7, 10, 11 is 5, 3, 2, 2. So a step of a long run takes tens of bytes.
"""

from collections.abc import Sequence

import msgspec

Packed = bytes | tuple[int, ...]
"""As `pack_ordinals` returns them, or one by one, as earlier versions wrote them."""

_LENGTHS = msgspec.msgpack.Decoder(list[int])


def pack_ordinals(ordinals: Sequence[int]) -> bytes:
    """Return ordinals, which ascend, in few bytes.

    Example:
        >>> list(pack_ordinals((5, 6, 7, 10, 11)))[1:]  # after the length of the list
        [5, 3, 2, 2]
    """
    lengths = list[int]()
    end = 0  # one behind the last
    for ordinal in ordinals:
        if lengths and ordinal == end:
            lengths[-1] += 1
        else:
            lengths += (ordinal - end, 1)
        end = ordinal + 1
    return msgspec.msgpack.encode(lengths)


def unpack_ordinals(packed: Packed) -> list[int]:
    """Return the ordinals again.

    Raises:
        msgspec.DecodeError: if these are no such bytes.
    """
    if isinstance(packed, tuple):
        return list(packed)
    ordinals, end = list[int](), 0
    for at, length in enumerate(_LENGTHS.decode(packed)):
        if at % 2:
            ordinals.extend(range(end, end + length))
        end += length
    return ordinals
