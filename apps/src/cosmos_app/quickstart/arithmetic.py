"""Generated arithmetic: every sum of a small table, shuffled, split into train and held out."""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_core.rundir import write_atomic

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticConfig:
    """Sums ``a + b`` with ``0 <= a <= max_first`` and ``0 <= b <= max_second``.

    Attributes:
        max_first: largest first number.
        max_second: largest second number.
        held_out: how many of the sums are never trained on and measure accuracy instead.
    """

    max_first: int = 99
    max_second: int = 19
    held_out: int = 128

    def __post_init__(self) -> None:
        """Refuse a table that leaves nothing to train on.

        Raises:
            ValueError: if ``held_out`` is not smaller than the number of sums.
        """
        num_sums = (self.max_first + 1) * (self.max_second + 1)
        if not 0 < self.held_out < num_sums:
            raise ValueError(f"held_out is {self.held_out}; the table has {num_sums} sums")


def arithmetic_rows(config: ArithmeticConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Return (train, held-out) rows ``{"prompt": "12+7=", "answer": "19"}``; no row is in both."""
    sums = [(a, b) for a in range(config.max_first + 1) for b in range(config.max_second + 1)]
    random.Random(seed).shuffle(sums)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    return rows[config.held_out :], rows[: config.held_out]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON lines, all or none; dates and the like as texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(row, default=str) + "\n" for row in rows))
