"""Which samples share a row: equal work for every rank and every micro-batch, within a budget.

Lengths alone decide, so every rank works out the whole plan and takes its own part; nothing is
sent, and the same lengths give the same plan everywhere.
"""

import heapq
from collections.abc import Sequence

from cosmos_parallel.errors import PackingError

Parts = list[list[int]]


def plan_micro_batches(
    lengths: Sequence[int], *, max_tokens: int, num_ranks: int = 1
) -> list[Parts]:
    """Deal samples to ranks and to micro-batches of at most ``max_tokens`` tokens each.

    Ranks get about equal numbers of tokens, and equal numbers of micro-batches as long as they
    have samples for them: a rank with fewer would wait in passes over nothing.

    Example:
        >>> plan_micro_batches([7, 3, 5, 5, 2, 8], max_tokens=10, num_ranks=1)
        [[[0, 1], [2, 3], [4, 5]]]

    Args:
        lengths: tokens of each sample, 1 or more.
        max_tokens: budget of a micro-batch; a longer sample has one to itself.
        num_ranks: ranks that share the step, over all replicas.

    Returns:
        For each rank its micro-batches, each the ascending indices of its samples.

    Raises:
        PackingError: if a length or a number is below 1; names the sample.
    """
    for index, length in enumerate(lengths):
        if length < 1:
            raise PackingError(f"sample {index} has {length} tokens; a sample has 1 or more")
    if max_tokens < 1 or num_ranks < 1:
        raise PackingError(f"max_tokens is {max_tokens}, num_ranks {num_ranks}; both are 1 or more")
    ranks = balanced_parts(lengths, num_ranks)
    plans = [_fill([lengths[i] for i in mine], max_tokens, 1) for mine in ranks]
    fewest = max(len(plan) for plan in plans)
    return [
        [
            [mine[i] for i in part]
            for part in (
                plan
                if len(plan) == fewest
                else _fill([lengths[i] for i in mine], max_tokens, min(fewest, len(mine)))
            )
        ]
        for mine, plan in zip(ranks, plans, strict=True)
    ]


def balanced_parts(sizes: Sequence[int], num_parts: int) -> Parts:
    """Divide items into parts of about equal total size, by the largest differencing method.

    Every item starts as a partition with one part in use. The two partitions whose parts differ
    most are joined, the largest part of one with the smallest of the other, until one is left
    (Karmarkar and Karp, 1982; for several parts Korf, 2009).

    Args:
        sizes: of the items, 0 or more.
        num_parts: how many parts, of which some stay empty if there are fewer items.

    Returns:
        The parts, largest total first; in each the ascending indices of its items.
    """
    # (-difference, tie break, [(total, items)] with the largest total first)
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, size in enumerate(sizes):
        empty: list[tuple[int, list[int]]] = [(0, []) for _ in range(num_parts - 1)]
        heap.append((-size if num_parts > 1 else 0, index, [(size, [index]), *empty]))
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        joined = sorted(
            (
                (mine[0] + theirs[0], mine[1] + theirs[1])
                for mine, theirs in zip(first[2], reversed(second[2]), strict=True)
            ),
            key=lambda part: -part[0],
        )
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], first[1], joined))
    if not heap:
        return [[] for _ in range(num_parts)]
    return [sorted(items) for _, items in heap[0][2]]


def _fill(lengths: Sequence[int], max_tokens: int, fewest: int) -> Parts:
    """Cut samples into parts of at most ``max_tokens``, at least ``fewest`` if there are so many.

    Balanced parts where they fit; first-fit decreasing, which always fits, where they need more.
    """
    if not lengths:
        return []
    fitted = _first_fit(lengths, max_tokens)
    least = max(fewest, -(-sum(lengths) // max_tokens))
    for num_parts in range(least, len(fitted) + 1):
        parts = balanced_parts(lengths, num_parts)
        if all(_fits([lengths[i] for i in part], max_tokens) for part in parts):
            return sorted(parts)
    if len(fitted) < fewest:
        return sorted(part for part in balanced_parts(lengths, fewest) if part)
    return sorted(fitted)


def _fits(lengths: Sequence[int], max_tokens: int) -> bool:
    return bool(lengths) and (len(lengths) == 1 or sum(lengths) <= max_tokens)


def _first_fit(lengths: Sequence[int], max_tokens: int) -> Parts:
    parts: Parts = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = (place for place, left in enumerate(room) if lengths[index] <= left)
        place = next(fits, len(parts))
        if place == len(parts):
            parts.append([])
            room.append(max_tokens)
        parts[place].append(index)
        room[place] -= lengths[index]
    return [sorted(part) for part in parts]
