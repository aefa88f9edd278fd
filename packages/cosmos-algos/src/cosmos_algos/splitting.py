"""Which samples go to which rank and which micro-batch: deterministic, by length alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from cosmos_algos.errors import AlgorithmConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Which part of a step a rank trains on, and in what portions.

    Attributes:
        max_tokens: padded tokens of a micro-batch.
        rank: position among the ranks that share the step.
        num_ranks: how many they are, over all replicas.
        pad_id: token id of the padding.
        vocab_size: token ids have to be below it; 0 where it is not known.
    """

    max_tokens: int
    rank: int = 0
    num_ranks: int = 1
    pad_id: int = 0
    vocab_size: int = 0

    def __post_init__(self) -> None:
        """Refuse a rank that is none of those that share the step.

        Raises:
            AlgorithmConfigError: names what is out of range.
        """
        if self.max_tokens < 1:
            raise AlgorithmConfigError(f"share: max_tokens {self.max_tokens} must be 1 or more")
        if not 0 <= self.rank < self.num_ranks:
            raise AlgorithmConfigError(
                f"share: rank {self.rank} of num_ranks {self.num_ranks}; ranks count from 0, and "
                "num_ranks is how many share the step"
            )


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
