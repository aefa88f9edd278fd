"""Chains of sums: a task whose answers are worked out step by step, and so differ much in length.

    "3+8+5="  ->  "11.16"

The answer names every running total. How many numbers a chain has is lognormal, so that most
answers are short and the longest of a batch is several times as long as their mean, as it is where
models reason.
"""

import random
from dataclasses import dataclass

Row = dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainConfig:
    """Which chains there are.

    Attributes:
        rows: to train on.
        held_out: that measure accuracy instead.
        median_terms: half of the chains have no more numbers than this.
        sigma: spread of the logarithm of their number.
        max_terms: the longest chain.
        max_term: the largest number in a chain.
    """

    rows: int = 8192
    held_out: int = 256
    median_terms: float = 4.0
    sigma: float = 0.8
    max_terms: int = 30
    max_term: int = 5


def chain_rows(config: ChainConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Return (train, held-out) rows ``{"prompt": "3+8+5=", "answer": "11.16"}``, all different."""
    numbers = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < config.rows + config.held_out:
        drawn = round(config.median_terms * numbers.lognormvariate(0, config.sigma))
        terms = [
            numbers.randint(0, config.max_term) for _ in range(min(max(2, drawn), config.max_terms))
        ]
        totals = [sum(terms[: place + 1]) for place in range(1, len(terms))]
        rows["+".join(map(str, terms)) + "="] = ".".join(map(str, totals))
    found = [{"prompt": prompt, "answer": answer} for prompt, answer in rows.items()]
    numbers.shuffle(found)
    return found[config.held_out :], found[: config.held_out]
