"""Generated chains of sums: answers that are worked out step by step, and so differ much in length.

    "3+8+5="  ->  "11.16"

The answer names every running total. How many numbers a chain has is lognormal, so that most
answers are short and the longest of a batch is several times as long as their mean, as it is where
models reason.
"""

import random
from dataclasses import dataclass
from itertools import accumulate

from cosmos_app.errors import DataError
from cosmos_app.quickstart.arithmetic import Row
from cosmos_app.ranges import require_at_least

_FEWEST_TERMS = 2
_WIDEST = 5
_TRIES = 100
"""Draws of a row, on average, before a request for as many different ones is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainConfig:
    """Which chains there are.

    Attributes:
        rows: to train on.
        held_out: never trained on; they measure accuracy instead.
        median_terms: half of the chains have no more numbers than this.
        sigma: spread of the logarithm of their number; 0 for chains of one length.
        max_terms: the longest chain.
        max_term: the largest number in a chain.
    """

    rows: int = 8192
    held_out: int = 256
    median_terms: float = 4.0
    sigma: float = 0.8
    max_terms: int = 30
    max_term: int = 5

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: naming what is out of range.
        """
        least = {"rows": 1, "held_out": 1, "median_terms": 1, "max_term": 1}
        require_at_least(self, {**least, "sigma": 0, "max_terms": _FEWEST_TERMS})
        if self.median_terms > self.max_terms or self.sigma > _WIDEST:
            raise ValueError(
                f"median_terms is {self.median_terms} and sigma {self.sigma}; want at most "
                f"max_terms, {self.max_terms}, and {_WIDEST}"
            )


def chain_rows(config: ChainConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Return (train, held-out) rows ``{"prompt": "3+8+5=", "answer": "11.16"}``, all different.

    Raises:
        DataError: if there are not as many different chains of such lengths.
    """
    numbers = random.Random(seed)
    wanted = config.rows + config.held_out
    rows: dict[str, str] = {}
    for _ in range(_TRIES * wanted):
        drawn = round(config.median_terms * numbers.lognormvariate(0, config.sigma))
        terms = [
            numbers.randint(0, config.max_term)
            for _ in range(min(max(_FEWEST_TERMS, drawn), config.max_terms))
        ]
        totals = list(accumulate(terms))
        rows["+".join(map(str, terms)) + "="] = ".".join(map(str, totals[1:]))
        if len(rows) == wanted:
            break
    else:
        raise DataError(
            f"data.chains: {len(rows)} different chains were found where rows and held_out want "
            f"{wanted}; want fewer, longer ones or larger numbers"
        )
    found: list[Row] = [{"prompt": prompt, "answer": answer} for prompt, answer in rows.items()]
    numbers.shuffle(found)
    return found[config.held_out :], found[: config.held_out]
