"""Which samples go to which rank and which micro-batch: deterministic, by length alone."""

from collections.abc import Sequence

from cosmos_algos.errors import AlgorithmConfigError


def split_ranks(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deal samples to ranks so that their token counts are close (longest first, to the lightest).

    Args:
        lengths: tokens of each sample.
        num_ranks: ranks that share the step.

    Returns:
        For each rank the indices it trains on, ascending; a rank may have none.

    Raises:
        AlgorithmConfigError: if there is no rank.
    """
    if num_ranks < 1:
        raise AlgorithmConfigError(f"split: num_ranks is {num_ranks}; it must be 1 or more")
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in _longest_first(lengths):
        lightest = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        shares[lightest].append(index)
        loads[lightest] += lengths[index]
    return [sorted(share) for share in shares]


def split_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut samples into micro-batches of at most ``max_tokens`` padded tokens.

    Samples of like length share a batch, there are as few batches as that order allows, and
    among those cuts the fullest batch is as small as can be. The order of batches and the order
    within one are part of the answer: the same lengths give the same lists everywhere.

    Example:
        >>> split_batches([3, 9, 3, 8], max_tokens=20)
        [[1, 3], [0, 2]]

    Args:
        lengths: tokens of each sample.
        max_tokens: rows times longest row; a sample longer than this gets a batch of its own.

    Returns:
        Lists of indices, longest samples first; every index once.
    """
    order = _longest_first(lengths)
    if not order:
        return []
    fewest = len(_cut(order, lengths, max_tokens))
    low, high = lengths[order[0]], max(max_tokens, lengths[order[0]])
    while low < high:
        middle = (low + high) // 2
        if len(_cut(order, lengths, middle)) <= fewest:
            high = middle
        else:
            low = middle + 1
    return _cut(order, lengths, low)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def _cut(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill batches one after the other; the first sample of each is its longest."""
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
