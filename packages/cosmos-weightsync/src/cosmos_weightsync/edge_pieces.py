"""The pieces of one edge, and what follows from them: worked out once, used for every version."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.chunks import HeldBoxes, Message, schedule
from cosmos_weightsync.placed_messages import PlacedMessage
from cosmos_weightsync.planning import Piece
from cosmos_weightsync.stream_runs import Run, received_runs, sent_runs
from cosmos_weightsync.streaming import CompiledRows
from cosmos_weightsync.transports import Side, Windows

__all__ = ["Batch", "EdgePieces", "EdgePlaces", "Views"]


class EdgePieces(Sequence[Piece]):
    """Pieces in travel order; does not change.

    Attributes:
        regions: Tensor name and box of each.
        num_bytes: Of all together.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = tuple(pieces)
        self.regions: Sequence[tuple[str, Box]] = [(p.name, p.box) for p in self._pieces]
        self.num_bytes = sum(piece.num_bytes for piece in self._pieces)
        self._messages: dict[tuple[int, int], list[Message]] = {}
        self._places: WeakKeyDictionary[HeldBoxes, EdgePlaces] = WeakKeyDictionary()

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> "EdgePieces":
        """These pieces; what is worked out of them is lost unless they are `EdgePieces` already."""
        return pieces if isinstance(pieces, EdgePieces) else cls(pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | Sequence[Piece]:
        return self._pieces[index]

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    def messages(self, message_bytes: int, direct_bytes: int) -> list[Message]:
        """How the pieces travel as messages; see `schedule`."""
        key = message_bytes, direct_bytes
        if key not in self._messages:
            self._messages[key] = list(schedule(self, message_bytes, direct_bytes))
        return self._messages[key]

    def places(self, held: HeldBoxes) -> "EdgePlaces":
        """Where the pieces lie in memory that need not be waited for."""
        found = self._places.get(held)
        if found is None:
            found = self._places[held] = EdgePlaces(self, held)
        return found


class Views(list[Tensor]):
    """The memory of each piece; unlike a plain list it can be known again without being kept."""


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Pieces ``first:stop``, to be read at once.

    Attributes:
        first: The first of them.
        stop: The first after them.
        num_bytes: Of all together.
        take: Copies them into place and returns their checksums; ``None`` for a piece that is no
            rows of bytes at one of the ends.
    """

    first: int
    stop: int
    num_bytes: int
    take: Callable[[], list[int]] | None


class EdgePlaces:
    """Where the pieces of an edge lie.

    Attributes:
        are_whole: Whether each lies in one place.
        views: The memory of each, if so; else of none.
        shapes: Shape and dtype of each of ``views``.
    """

    def __init__(self, pieces: EdgePieces, held: HeldBoxes) -> None:
        self.are_whole = all(held.is_whole(name, box) for name, box in pieces.regions)
        self.views = Views(held.view(name, box) for name, box in pieces.regions if self.are_whole)
        self.shapes: Sequence[tuple[Sequence[int], torch.dtype]] = [
            (view.shape, view.dtype) for view in self.views
        ]
        self._raws = [held.raw(name, box) for name, box in pieces.regions]
        self._sizes = [piece.num_bytes for piece in pieces]
        self._messages: dict[tuple[int, str], list[PlacedMessage]] = {}
        self._runs: dict[tuple[int, Side, int], list[Run]] = {}
        self._batches: WeakKeyDictionary[Windows, tuple[int, list[Batch]]] = WeakKeyDictionary()

    def messages(
        self, messages: Sequence[Message], held: HeldBoxes, device: torch.device
    ) -> list[PlacedMessage]:
        """The messages that `EdgePieces.messages` made, over this memory."""
        key = id(messages), device.type
        if key not in self._messages:
            self._messages[key] = [PlacedMessage(each, held, device) for each in messages]
        return self._messages[key]

    def runs(
        self, placed: list[PlacedMessage], side: Side, compiled: CompiledRows, most_bytes: int
    ) -> list[Run]:
        """What `messages` returned, as runs over a stream."""
        key = id(placed), side, most_bytes
        if key not in self._runs:
            found = (
                sent_runs(placed, compiled, most_bytes)
                if side == "sender"
                else received_runs(placed, self._sizes, compiled, most_bytes)
            )
            self._runs[key] = list(found)
        return self._runs[key]

    def batches(self, windows: Windows, batch_bytes: int) -> list[Batch]:
        """All pieces, in order, as they are best read out of these windows.

        Args:
            windows: Onto each piece at its source.
            batch_bytes: What may be read at once, unless it is a single piece.
        """
        known = self._batches.get(windows)
        if known is None or known[0] != batch_bytes:
            batches = [self._batch(windows, *each) for each in self._ranges(windows, batch_bytes)]
            known = self._batches[windows] = batch_bytes, batches
        return known[1]

    def _ranges(self, windows: Windows, batch_bytes: int) -> Iterator[tuple[int, int]]:
        first = filled = 0
        for number, size in enumerate(self._sizes):
            is_alone = not self._are_rows(windows, number)
            is_full = filled + size > batch_bytes or is_alone
            if number > first and (is_full or not self._are_rows(windows, number - 1)):
                yield first, number
                first, filled = number, 0
            filled += size
        if self._sizes:
            yield first, len(self._sizes)

    def _batch(self, windows: Windows, first: int, stop: int) -> Batch:
        take = None
        if self._are_rows(windows, first):
            raws = [raw for raw in self._raws[first:stop] if raw is not None]
            take = windows.prepare(first, raws)
        return Batch(first, stop, sum(self._sizes[first:stop]), take)

    def _are_rows(self, windows: Windows, number: int) -> bool:
        return self._raws[number] is not None and windows[number].row_bytes is not None
