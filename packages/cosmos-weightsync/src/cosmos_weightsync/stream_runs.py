"""Messages over a stream that travel many to a call.

A matrix of an expert takes less time to move than Python takes to say so. The bytes are those that
single messages have, so either end may do as it likes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cosmos_weightsync.chunks import Message
from cosmos_weightsync.placed_messages import PlacedMessage
from cosmos_weightsync.streaming import SHORTEST_COMPILED, CompiledRows, StreamMoves

__all__ = ["Run", "received_runs", "sent_runs"]


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """Messages that follow one another.

    Attributes:
        placed: They, and where they lie.
        moves: All of them, to be moved at once; ``None`` for a message that travels by itself.
    """

    placed: Sequence[PlacedMessage]
    moves: StreamMoves | None


def sent_runs(
    placed: Sequence[PlacedMessage], compiled: CompiledRows, most_bytes: int
) -> Iterator[Run]:
    """Messages that fall into rows go in runs of at most so many bytes, or by themselves."""
    return _runs(placed, [each.rows for each in placed], compiled.prepare_send, most_bytes)


def received_runs(
    placed: Sequence[PlacedMessage],
    piece_bytes: Sequence[int],
    compiled: CompiledRows,
    most_bytes: int,
) -> Iterator[Run]:
    """The same for messages that are whole pieces and arrive in one stretch of memory.

    Args:
        placed: In order.
        piece_bytes: Of every piece of the edge.
        compiled: Moves them.
        most_bytes: Of a run, unless it is a single message.
    """
    wheres = [each.raw if _is_whole(each.message, piece_bytes) else None for each in placed]
    return _runs(placed, wheres, compiled.prepare_receive, most_bytes)


def _is_whole(message: Message, piece_bytes: Sequence[int]) -> bool:
    """Whether a message is one whole piece, of a size that the library hashes."""
    size = piece_bytes[message.chunks[0].piece]
    return len(message.chunks) == 1 and size == message.num_bytes >= SHORTEST_COMPILED


def _runs(
    placed: Sequence[PlacedMessage],
    wheres: Sequence[np.ndarray | None],
    prepare: Callable[[Sequence[np.ndarray]], StreamMoves],
    most_bytes: int,
) -> Iterator[Run]:
    first = filled = 0
    for number, (each, where) in enumerate(zip(placed, wheres, strict=True)):
        size = each.message.num_bytes
        if number > first and (where is None or filled + size > most_bytes):
            yield _run(placed[first:number], wheres[first:number], prepare)
            first, filled = number, 0
        if where is None:
            yield Run([each], None)
            first = number + 1
        else:
            filled += size
    if first < len(placed):
        yield _run(placed[first:], wheres[first:], prepare)


def _run(
    placed: Sequence[PlacedMessage],
    wheres: Sequence[np.ndarray | None],
    prepare: Callable[[Sequence[np.ndarray]], StreamMoves],
) -> Run:
    return Run(placed, prepare([where for where in wheres if where is not None]))
