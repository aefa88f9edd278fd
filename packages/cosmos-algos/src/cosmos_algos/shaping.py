"""What is trained on, and how length changes a reward, before advantages are worked out."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from cosmos_algos.arguments import check_coefficients, check_lengths, group_keys
from cosmos_algos.errors import AlgorithmConfigError
from cosmos_core.trajectory import FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongConfig:
    """A penalty that grows over the last tokens before the longest response allowed.

    Attributes:
        max_tokens: L_max, beyond which the whole penalty falls due.
        buffer: L_cache, over which it grows from 0.
        penalty: the whole penalty.
    """

    max_tokens: int
    buffer: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a buffer that is not inside the response, and a penalty that is a gain."""
        if not 0 < self.buffer <= self.max_tokens:
            raise AlgorithmConfigError(
                f"overlong: buffer {self.buffer} must be in 1 to max_tokens {self.max_tokens}"
            )
        check_coefficients("overlong", {"penalty": self.penalty})


def overlong_penalties(num_tokens: Sequence[int], config: OverlongConfig) -> list[float]:
    """Return what to add to each reward: 0, falling to -penalty over the buffer, then that.

    Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13).
    """
    start = config.max_tokens - config.buffer
    return [
        -config.penalty * min(max((length - start) / config.buffer, 0.0), 1.0)
        for length in num_tokens
    ]


def without_truncated(
    num_tokens: Sequence[int], finish_reasons: Sequence[FinishReason]
) -> list[int]:
    """Return trained tokens per sample with those of samples cut off by a limit set to 0.

    Overlong filtering (DAPO, arXiv 2503.14476, section 3.4): a sample cut short says nothing of
    its answer. It keeps its place in its group's statistics, and weighs nothing in the loss.
    """
    columns = {"token counts": num_tokens, "finish reasons": finish_reasons}
    check_lengths("without_truncated", columns)
    pairs = zip(num_tokens, finish_reasons, strict=True)
    return [0 if reason == "length" else count for count, reason in pairs]


def length_rewards(
    num_tokens: Sequence[int], correct: Sequence[bool], groups: Sequence[Hashable] | Tensor
) -> list[float]:
    """Return the length reward of each sample relative to its group.

    λ = 0.5 - (len - min)/(max - min): λ where the answer is right, min(0, λ) where it is wrong,
    0 in a group of one length (Kimi k1.5, arXiv 2501.12599, section 2.3.3).
    """
    shortest: dict[Hashable, int] = {}
    longest: dict[Hashable, int] = {}
    keys = group_keys(groups)
    columns = {"token counts": num_tokens, "correct": correct, "group entries": keys}
    check_lengths("length rewards", columns)
    for length, group in zip(num_tokens, keys, strict=True):
        shortest[group] = min(shortest.get(group, length), length)
        longest[group] = max(longest.get(group, length), length)
    rewards: list[float] = []
    for length, right, group in zip(num_tokens, correct, keys, strict=True):
        spread = longest[group] - shortest[group]
        share = 0.5 - (length - shortest[group]) / spread if spread else 0.0
        rewards.append(share if right else min(0.0, share))
    return rewards


def budget_rewards(
    rewards: Sequence[float],
    num_tokens: Sequence[int],
    budgets: Sequence[int],
    *,
    rate: float = 0.0003,
) -> list[float]:
    """Return R - α |n_budget - n|: a response as long as its prompt asked for.

    Length-controlled policy optimization, exact form (L1, arXiv 2503.04697, eq. 1).

    Args:
        rewards: of each sample.
        num_tokens: n.
        budgets: n_budget, which the prompt names.
        rate: α, per token.
    """
    columns = {"rewards": rewards, "token counts": num_tokens, "budgets": budgets}
    check_lengths("budget rewards", columns)
    rows = zip(rewards, num_tokens, budgets, strict=True)
    return [reward - rate * abs(budget - length) for reward, length, budget in rows]


def capped_budget_rewards(
    rewards: Sequence[float],
    num_tokens: Sequence[int],
    budgets: Sequence[int],
    *,
    rate: float = 0.0003,
    offset: float = 0.5,
) -> list[float]:
    """Return R clip(α (n_budget - n) + δ, 0, 1): a response no longer than its prompt asked for.

    Length-controlled policy optimization, maximum form (L1, arXiv 2503.04697, eq. 2).

    Args:
        rewards: of each sample.
        num_tokens: n.
        budgets: n_budget, which the prompt names.
        rate: α, per token.
        offset: δ, what a response of exactly n_budget keeps.
    """
    columns = {"rewards": rewards, "token counts": num_tokens, "budgets": budgets}
    check_lengths("budget rewards", columns)
    rows = zip(rewards, num_tokens, budgets, strict=True)
    return [
        reward * min(max(rate * (budget - length) + offset, 0.0), 1.0)
        for reward, length, budget in rows
    ]


def groups_with_signal(
    rewards: Sequence[float] | Tensor, groups: Sequence[Hashable] | Tensor, most: int = 0
) -> list[Hashable]:
    """Return the groups that have two different rewards, in order of appearance.

    Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a step is filled with these, and more
    groups are sampled until it is full.

    Args:
        rewards: of each sample; NaN for a failed one, which takes no part.
        groups: of each sample.
        most: how many groups at most; 0 for all.
    """
    seen: dict[Hashable, set[float]] = {}
    keys = group_keys(groups)
    check_lengths("groups with signal", {"rewards": rewards, "group entries": keys})
    for reward, group in zip(rewards, keys, strict=True):
        present = seen.setdefault(group, set())
        if not math.isnan(reward):
            present.add(float(reward))
    found = [group for group, present in seen.items() if len(present) > 1]
    return found[:most] if most else found
