"""Which samples share a row: equal work for every rank and every micro-batch, within a budget.

Lengths alone decide, so every rank works out the whole plan and takes its own part; nothing is
sent, and the same lengths give the same plan everywhere.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter

from cosmos_parallel.errors import PackingError

Parts = list[list[int]]
# total and items of each part that is in use, the largest total first
_Partition = list[tuple[int, list[int]]]


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
    if not sizes:
        return [[] for _ in range(num_parts)]
    # (-difference, tie break, partition)
    heap = [_entry([(size, [index])], index, num_parts) for index, size in enumerate(sizes)]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, _entry(_joined(first[2], second[2], num_parts), first[1], num_parts))
    found = [sorted(items) for _, items in heap[0][2]]
    return found + [[] for _ in range(num_parts - len(found))]


def _entry(partition: _Partition, tie_break: int, num_parts: int) -> tuple[int, int, _Partition]:
    least = partition[-1][0] if len(partition) == num_parts else 0
    return least - partition[0][0], tie_break, partition


def _joined(one: _Partition, other: _Partition, num_parts: int) -> _Partition:
    """Join two partitions, the largest part of one with the smallest of the other.

    Those that are in no use are not in the lists, and meet the largest: what is left meets.
    """
    num_met = max(0, len(one) + len(other) - num_parts)
    alone, left = one[: len(one) - num_met], other[: len(other) - num_met]
    meeting = zip(one[len(alone) :], reversed(other[len(left) :]), strict=True)
    met = [(mine[0] + theirs[0], mine[1] + theirs[1]) for mine, theirs in meeting]
    return sorted([*alone, *met, *reversed(left)], key=itemgetter(0), reverse=True)


def _fill(lengths: Sequence[int], max_tokens: int, fewest: int) -> Parts:
    """Cut samples into parts of at most ``max_tokens``, at least ``fewest`` if there are so many.

    Balanced parts where they fit; first-fit decreasing, which always fits, where they need more.
    """
    if not lengths:
        return []
    fitted = _first_fit(lengths, max_tokens)
    least = max(fewest, _fewest(lengths, max_tokens))
    for num_parts in range(least, len(fitted) + 1):
        parts = balanced_parts(lengths, num_parts)
        if all(_fits([lengths[i] for i in part], max_tokens) for part in parts):
            return sorted(parts)
    if len(fitted) < fewest:
        return sorted(part for part in balanced_parts(lengths, fewest) if part)
    return sorted(fitted)


def _fewest(lengths: Sequence[int], max_tokens: int) -> int:
    """Return how many parts are needed at least (Martello and Toth, 1990, bound L2).

    Whatever size s of at most half the budget one takes: samples over the budget less s are alone
    with smaller ones, others over half of it are apart, and what these leave is all that samples of
    s up to a half can have without parts of their own.
    """
    sizes = sorted(min(length, max_tokens) for length in lengths)
    before = [0, *accumulate(sizes)]
    half, num = bisect_right(sizes, max_tokens // 2), len(sizes)
    most = 0
    for small in {0, *sizes[:half]}:
        start, end = bisect_left(sizes, small), bisect_right(sizes, max_tokens - small)
        room = max(0, end - half) * max_tokens - (before[max(end, half)] - before[half])
        over = before[half] - before[start] - room
        most = max(most, num - half + max(0, -(-over // max_tokens)))
    return most


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
