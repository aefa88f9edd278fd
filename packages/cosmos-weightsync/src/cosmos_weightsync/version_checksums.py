"""Checksums of the boxes that somebody asks for, of versions that follow one another.

What was asked for in one version is likely asked for in the next: it is then hashed while the
version is written, when the bytes are in the cache and before anybody waits. Readers ask with the
same list of pieces each time, so where its checksums are is looked up once.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.checksums import tensor_checksum
from cosmos_weightsync.planning import Piece

__all__ = ["ChecksumCache", "ExpectedBoxes", "VersionChecksums"]

Key = tuple[str, Box]
_FORGOTTEN_AFTER = 2


@dataclass(eq=False, slots=True)
class _Request:
    """A list of pieces that somebody asked for."""

    pieces: Sequence[Piece]
    unused_for: int = 0


class ExpectedBoxes:
    """The boxes that are likely to be asked for; does not change.

    Attributes:
        keys: Tensor name and box of each.
    """

    def __init__(self, requests: Sequence[_Request]) -> None:
        numbers: dict[Key, int] = {}
        for request in requests:
            for piece in request.pieces:
                numbers.setdefault((piece.name, piece.box), len(numbers))
        self.keys = tuple(numbers)
        # By the identity of lists that are kept alive here.
        self._numbers = {
            id(r.pieces): (r.pieces, [numbers[p.name, p.box] for p in r.pieces]) for r in requests
        }

    def numbers_of(self, pieces: Sequence[Piece]) -> list[int] | None:
        """Which of `keys` the pieces are; ``None`` unless this very list was asked for before."""
        known = self._numbers.get(id(pieces))
        return None if known is None else known[1]


class ChecksumCache:
    """What is asked for of versions; a list not asked for in two of them is forgotten.

    May be used from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[_Request] = []
        self._expected = ExpectedBoxes(())
        self._is_new = False

    def start(self) -> "VersionChecksums":
        """The checksums of a version about to be written; nothing is known of it yet."""
        with self._lock:
            for request in self._requests:
                request.unused_for += 1
            kept = [r for r in self._requests if r.unused_for <= _FORGOTTEN_AFTER]
            if self._is_new or len(kept) < len(self._requests):
                self._requests, self._is_new = kept, False
                self._expected = ExpectedBoxes(kept)
            return VersionChecksums(self._asked, self._expected)

    def _asked(self, pieces: Sequence[Piece]) -> None:
        with self._lock:
            for request in self._requests:
                if request.pieces is pieces:
                    request.unused_for = 0
                    return
            self._requests.append(_Request(pieces))
            self._is_new = True


class VersionChecksums:
    """The checksums of one version. May be used from any thread once the version is written.

    Attributes:
        expected: What is likely to be asked for.
    """

    def __init__(self, asked: Callable[[Sequence[Piece]], None], expected: ExpectedBoxes) -> None:
        self.expected = expected
        self._asked = asked
        self._values: list[int] = []
        self._known: dict[Key, int] = {}

    def learn(self, values: Mapping[int, int]) -> None:
        """Checksums that were computed while the version was written.

        Args:
            values: By their number in `ExpectedBoxes.keys`.
        """
        keys = self.expected.keys
        if len(values) == len(keys):
            self._values = [values[number] for number in range(len(keys))]
        else:
            self._known.update({keys[number]: value for number, value in values.items()})

    def of_pieces(self, pieces: Sequence[Piece], view: Callable[[str, Box], Tensor]) -> list[int]:
        """The checksums of these pieces; computes those that nobody asked for before."""
        self._asked(pieces)
        numbers = self.expected.numbers_of(pieces) if self._values else None
        if numbers is not None:
            return [self._values[number] for number in numbers]
        self._known.update(zip(self.expected.keys, self._values, strict=False))
        keys = [(piece.name, piece.box) for piece in pieces]
        for key in keys:
            if key not in self._known:
                self._known[key] = tensor_checksum(view(*key))
        return [self._known[key] for key in keys]
