"""Which checkpoints of a run stay, and which go."""

import math
from dataclasses import dataclass
from typing import Literal

from cosmos_core.choices import check_choice

Better = Literal["lower", "higher"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionConfig:
    """Which checkpoints stay.

    Attributes:
        keep: how many of those saved last.
        keep_best: how many of the best besides, among those saved with a score.
        better: whether lower or higher scores are better.
    """

    keep: int = 2
    keep_best: int = 0
    better: Better = "lower"

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: if nothing would stay, a number is below 0, or ``better`` is neither.
        """
        check_choice("better", self.better, Better)
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}; at least 1 checkpoint must stay")
        if self.keep_best < 0:
            raise ValueError(f"keep_best is {self.keep_best}; it must be 0 or more")

    def ranked(self, scores: "dict[int, float]") -> list[int]:
        """Return steps by their scores, best first; of equals the newest first; no NaN."""
        sign = 1.0 if self.better == "lower" else -1.0
        known = (step for step, score in scores.items() if not math.isnan(score))
        return sorted(known, key=lambda step: (sign * scores[step], -step))

    def doomed(self, steps: list[int], scores: "dict[int, float]") -> list[int]:
        """Return the steps whose checkpoints go, of steps in the order they were saved in."""
        kept = {*steps[-self.keep :], *self.ranked(scores)[: self.keep_best]}
        return [step for step in steps if step not in kept]
