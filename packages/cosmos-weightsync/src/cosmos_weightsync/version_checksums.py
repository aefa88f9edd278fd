"""Checksums of the boxes that somebody asks for, of versions that follow one another.

What was asked for in one version is likely asked for in the next: it is then hashed while the
version is written, when the bytes are in the cache and before anybody waits. Readers ask with the
same list of pieces each time, so where its checksums are is looked up once.

Who asks for other boxes gets what is in memory by then, which may have been damaged. So all that
nobody asked for is hashed as well while it is written, in boxes of its own, and whoever reads parts
of these for the first time has the whole of them hashed once more and compared.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from cosmos_weightsync.boxes import Box, subtract_all
from cosmos_weightsync.errors import DigestError
from cosmos_weightsync.layout import ShardSpec
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
    """The boxes that are likely to be asked for, and what is left between them; does not change.

    Args:
        requests: Who asked for boxes.
        held: All that there is.

    Attributes:
        keys: Tensor name and box of each; together they are all that is held.
    """

    def __init__(self, requests: Sequence[_Request], held: Sequence[ShardSpec]) -> None:
        numbers: dict[Key, int] = {}
        for request in requests:
            for piece in request.pieces:
                numbers.setdefault((piece.name, piece.box), len(numbers))
        asked = _by_name(numbers)
        for spec in held:
            for box in subtract_all(spec.box, asked.get(spec.name, ())):
                numbers.setdefault((spec.name, box), len(numbers))
        self.keys: Sequence[Key] = tuple(numbers)
        self.boxes = _by_name(numbers)
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

    Args:
        held: What every version has.
    """

    def __init__(self, held: Sequence[ShardSpec]) -> None:
        self._lock = threading.Lock()
        self._held = held
        self._requests: list[_Request] = []
        self._expected = ExpectedBoxes((), held)
        self._is_new = False

    def start(self) -> "VersionChecksums":
        """The checksums of a version about to be written; nothing is known of it yet."""
        with self._lock:
            for request in self._requests:
                request.unused_for += 1
            kept = [r for r in self._requests if r.unused_for <= _FORGOTTEN_AFTER]
            if self._is_new or len(kept) < len(self._requests):
                self._requests, self._is_new = kept, False
                self._expected = ExpectedBoxes(kept, self._held)
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

    @classmethod
    def of_received(cls, received: Mapping[Piece, int], held: Sequence[ShardSpec]) -> Self:
        """Those of a version that arrived in these pieces, each with its checksum."""
        request = _Request(tuple(received))
        found = cls(lambda pieces: None, ExpectedBoxes([request], held))
        found._known.update({(p.name, p.box): value for p, value in received.items()})
        return found

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

    def of_pieces(self, pieces: Sequence[Piece], checksum: Callable[[str, Box], int]) -> list[int]:
        """The checksums of these pieces; computes those that nobody asked for before.

        Args:
            pieces: Of tensors that are held.
            checksum: Of what lies in memory now.

        Raises:
            DigestError: what lies around one of these is not what was written.
        """
        self._asked(pieces)
        numbers = self.expected.numbers_of(pieces) if self._values else None
        if numbers is not None:
            return [self._values[number] for number in numbers]
        self._known.update(zip(self.expected.keys, self._values, strict=False))
        keys = [(piece.name, piece.box) for piece in pieces]
        found = {key: checksum(*key) for key in keys if key not in self._known}
        self._check(found, checksum)  # Afterwards, so that nothing can happen in between.
        self._known.update(found)
        return [self._known[key] for key in keys]

    def _check(self, found: Iterable[Key], checksum: Callable[[str, Box], int]) -> None:
        """Hold what these boxes are parts of against what was written."""
        checked: set[Key] = set()
        for name, box in found:
            for whole in self.expected.boxes.get(name, ()):
                key = name, whole
                if key in checked or key not in self._known or whole.intersect(box) is None:
                    continue
                checked.add(key)
                if checksum(*key) != self._known[key]:
                    raise DigestError(
                        f"{name} {whole}: what is kept of the version here has changed since it "
                        "was written, as in memory that fails"
                    )


def _by_name(keys: Iterable[Key]) -> Mapping[str, Sequence[Box]]:
    boxes: dict[str, list[Box]] = {}
    for name, box in keys:
        boxes.setdefault(name, []).append(box)
    return boxes
