"""Who is read from first, where a receiver reads from a few sources at a time."""

from collections.abc import Sequence

from cosmos_weightsync.staging import Edge

__all__ = ["in_turn"]


def in_turn(edges: Sequence[Edge], turn: float) -> list[Edge]:
    """The edges in the order in which a receiver begins them: those with relays come last.

    Args:
        edges: In the order of the plan.
        turn: At which part of the others to begin, below 1. If all receivers went by rank, all
            would wait for the first few senders, while the rest had nothing to do.
    """
    direct = [edge for edge in edges if not edge.is_relay]
    first = int(turn * len(direct))
    return [*direct[first:], *direct[:first], *(edge for edge in edges if edge.is_relay)]
