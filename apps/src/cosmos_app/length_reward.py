"""What the length of a response does to its reward, once the others of its group are there.

The formulas are those of `cosmos_algos`; a reward of its length alone is the kind ``length`` of
``reward.rewards``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cosmos_algos import budget_rewards, capped_budget_rewards, length_rewards
from cosmos_rollout import Failure, Outcome, RewardInput, RewardPool, Scored, Scorer

_NAME = "length_reward"


@dataclass(frozen=True, kw_only=True, slots=True)
class RelativeLength:
    """Rewards the shorter of the right answers to a prompt, and punishes the longer wrong ones.

    Adds weight x λ, where λ falls from 0.5 for the shortest of the group to -0.5 for the longest,
    and is at most 0 for a wrong one (Kimi k1.5, arXiv 2501.12599, section 2.3.3).

    Attributes:
        kind: selects this shape.
        weight: factor of λ.
        correct_above: a sample whose other rewards add up to more is right.
    """

    kind: Literal["relative"] = "relative"
    weight: float = 1.0
    correct_above: float = 0.0

    def __post_init__(self) -> None:
        _check_finite(self, {"weight": self.weight, "correct_above": self.correct_above})

    def totals(self, samples: Sequence[RewardInput], totals: Sequence[float]) -> list[float]:
        """Return the totals of siblings with what their lengths add."""
        shares = length_rewards(
            _lengths(samples), [total > self.correct_above for total in totals], [0] * len(samples)
        )
        return [total + self.weight * share for total, share in zip(totals, shares, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBudget:
    """A response as long as its row asks for: R - rate x |budget - tokens| (L1-Exact, 2503.04697).

    Attributes:
        kind: selects this shape.
        field: of the data row, the budget in tokens; the prompt has to name it too.
        rate: what a token costs.
    """

    kind: Literal["budget"] = "budget"
    field: str = "budget"
    rate: float = 0.0003

    def __post_init__(self) -> None:
        _check_finite(self, {"rate": self.rate})

    def totals(self, samples: Sequence[RewardInput], totals: Sequence[float]) -> list[float]:
        """Return the totals of siblings with what their lengths cost."""
        budgets = [budget_of(sample.fields, self.field) for sample in samples]
        return budget_rewards(totals, _lengths(samples), budgets, rate=self.rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthCap:
    """A response no longer than its row asks for (L1-Max, arXiv 2503.04697, eq. 2).

    R x clip(rate x (budget - tokens) + offset, 0, 1).

    Attributes:
        kind: selects this shape.
        field: of the data row, the budget in tokens; the prompt has to name it too.
        rate: what a token costs.
        offset: the share of its reward that a response of exactly the budget keeps.
    """

    kind: Literal["cap"] = "cap"
    field: str = "budget"
    rate: float = 0.0003
    offset: float = 0.5

    def __post_init__(self) -> None:
        _check_finite(self, {"rate": self.rate, "offset": self.offset})

    def totals(self, samples: Sequence[RewardInput], totals: Sequence[float]) -> list[float]:
        """Return the totals of siblings, each times what its length leaves of it."""
        budgets = [budget_of(sample.fields, self.field) for sample in samples]
        return capped_budget_rewards(
            totals, _lengths(samples), budgets, rate=self.rate, offset=self.offset
        )


LengthRewardConfig = RelativeLength | LengthBudget | LengthCap


def budget_of(row: Mapping[str, Any], field: str) -> int:
    """Return the budget that a data row names, in tokens.

    Raises:
        ValueError: if it names none.
    """
    budget = row.get(field)
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise ValueError(
            f"{_NAME} needs a number of tokens in the row's field {field!r}, found {budget!r}"
        )
    return budget


class LengthScorer:
    """A scorer whose totals depend on lengths; what that changes is a reward ``length_reward``."""

    def __init__(self, scorer: Scorer, config: LengthRewardConfig) -> None:
        self._scorer = scorer
        self._config = config

    async def score(self, sample: RewardInput) -> Outcome:
        """Return the rewards of one sample; its length counts in `score_group`."""
        return await self._scorer.score(sample)

    async def score_group(
        self, samples: Sequence[RewardInput], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Add what siblings earn as a group, and what their lengths do to that."""
        joined = list(await self._scorer.score_group(samples, outcomes))
        places = [place for place, outcome in enumerate(joined) if isinstance(outcome, Scored)]
        scored = [outcome for outcome in joined if isinstance(outcome, Scored)]
        try:
            totals = self._config.totals(
                [samples[place] for place in places], [outcome.total for outcome in scored]
            )
        except ValueError as error:  # the row of all siblings lacks its budget
            failure = Failure(reward=_NAME, error="ValueError", message=str(error), is_own=True)
            return [failure if isinstance(outcome, Scored) else outcome for outcome in joined]
        for place, outcome, total in zip(places, scored, totals, strict=True):
            rewards = {**outcome.rewards, _NAME: total - outcome.total}
            joined[place] = replace(outcome, rewards=rewards, total=total)
        return joined


def scorer_of(pool: RewardPool, config: LengthRewardConfig | None) -> Scorer:
    """Return what scores the samples of a run."""
    return pool if config is None else LengthScorer(pool, config)


def _lengths(samples: Sequence[RewardInput]) -> list[int]:
    return [sample.num_response_tokens for sample in samples]


def _check_finite(config: LengthRewardConfig, numbers: Mapping[str, float]) -> None:
    for name, value in numbers.items():
        if not math.isfinite(value) or (name != "correct_above" and value < 0.0):
            raise ValueError(f"{_NAME} {config.kind}: {name} is {value}; want 0 or more, finite")
