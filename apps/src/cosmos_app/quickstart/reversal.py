"""Generated strings of digits that are to be written backwards: answers that differ much in length.

    "48123="  ->  "32184"

How many digits a string has is lognormal, so that most answers are short and the longest of a batch
is several times as long as their mean, as it is where models reason.
"""

import random
from dataclasses import dataclass

from cosmos_app.errors import DataError
from cosmos_app.quickstart.arithmetic import Row
from cosmos_app.ranges import require_at_least

_DIGITS = "0123456789"
_WIDEST = 5
_TRIES = 100
"""Draws of a row, on average, before a request for as many different ones is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReversalConfig:
    """Which strings there are.

    Attributes:
        rows: to train on.
        held_out: never trained on; they measure accuracy instead.
        median_digits: half of the strings have no more digits than this.
        sigma: spread of the logarithm of their number; 0 for strings of one length.
        max_digits: the longest string.
    """

    rows: int = 8192
    held_out: int = 256
    median_digits: float = 12.0
    sigma: float = 0.8
    max_digits: int = 80

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: naming what is out of range.
        """
        least = {"rows": 1, "held_out": 1, "median_digits": 1, "sigma": 0, "max_digits": 1}
        require_at_least(self, least)
        if self.median_digits > self.max_digits or self.sigma > _WIDEST:
            raise ValueError(
                f"median_digits is {self.median_digits} and sigma {self.sigma}; want at most "
                f"max_digits, {self.max_digits}, and {_WIDEST}"
            )


def reversal_rows(config: ReversalConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Return (train, held-out) rows ``{"prompt": "481=", "answer": "184"}``, all different.

    Raises:
        DataError: if there are not as many different strings of such lengths.
    """
    numbers = random.Random(seed)
    wanted = config.rows + config.held_out
    strings: dict[str, None] = {}
    for _ in range(_TRIES * wanted):
        drawn = round(config.median_digits * numbers.lognormvariate(0, config.sigma))
        length = min(max(1, drawn), config.max_digits)
        strings["".join(numbers.choices(_DIGITS, k=length))] = None
        if len(strings) == wanted:
            break
    else:
        raise DataError(
            f"data.reversal: {len(strings)} different strings were found where rows and held_out "
            f"want {wanted}; want fewer or longer ones"
        )
    found: list[Row] = [{"prompt": f"{text}=", "answer": text[::-1]} for text in strings]
    numbers.shuffle(found)
    return found[config.held_out :], found[: config.held_out]
