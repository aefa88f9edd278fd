"""Rows that hold every pair of levels of any two factors, by greedy choice.

As AETG does it (Cohen et al., The AETG System, 1997): a row begins with a pair that no row holds
yet, grows by the level of each other factor that holds most such pairs, and is the best of several.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

Factors = Mapping[str, Sequence[str]]
Row = dict[str, str]
Conflict = Mapping[str, frozenset[str]]
"""Levels of two or more factors that do not go together: a row is wrong that has one of each."""
_CANDIDATES = 12


def is_wrong(row: Mapping[str, str], conflicts: Sequence[Conflict]) -> bool:
    """Whether a row, or the part of it that there is, holds a conflict."""
    return any(
        all(row.get(factor) in levels for factor, levels in conflict.items())
        for conflict in conflicts
    )


def covering_rows(factors: Factors, conflicts: Sequence[Conflict], seed: int) -> Iterator[Row]:
    """Give rows, one level of each factor, that hold every pair that any row can hold.

    The first rows hold the most pairs.
    """
    return _Cover(factors, conflicts, random.Random(seed)).rows()


class _Cover:
    """The pairs that no row holds yet, each as the numbers of its two levels."""

    def __init__(self, factors: Factors, conflicts: Sequence[Conflict], rng: random.Random) -> None:
        self._factors = factors
        self._of_factor = {
            factor: [conflict for conflict in conflicts if factor in conflict] for factor in factors
        }
        self._rng = rng
        levels = sorted((factor, level) for factor, of in factors.items() for level in of)
        self._levels = levels
        self._numbers = {level: number for number, level in enumerate(levels)}
        self._left = {
            pair
            for pair in itertools.combinations(range(len(levels)), 2)
            if levels[pair[0]][0] != levels[pair[1]][0]
            and not is_wrong(dict(levels[number] for number in pair), conflicts)
        }

    def rows(self) -> Iterator[Row]:
        while self._left:
            begun = min(self._left)
            row = dict(self._levels[number] for number in begun)
            tries = [self._grown(dict(row)) for _ in range(_CANDIDATES)]
            found = [row for row in tries if row is not None]
            if not found:  # every row with this pair holds a conflict of others
                self._left.discard(begun)
                continue
            best = max(found, key=lambda row: len(self._left & self._pairs(row)))
            self._left -= self._pairs(best)
            yield {factor: best[factor] for factor in self._factors}

    def _grown(self, row: Row) -> Row | None:
        """Add a level of each other factor, in random order."""
        missing = [factor for factor in self._factors if factor not in row]
        self._rng.shuffle(missing)
        held = [self._numbers[level] for level in row.items()]
        for factor in missing:
            allowed = [
                level
                for level in self._factors[factor]
                if not is_wrong({**row, factor: level}, self._of_factor[factor])
            ]
            if not allowed:
                return None
            self._rng.shuffle(allowed)
            row[factor] = max(allowed, key=lambda level: self._gain((factor, level), held))
            held.append(self._numbers[factor, row[factor]])
        return row

    def _gain(self, level: tuple[str, str], held: Sequence[int]) -> int:
        number = self._numbers[level]
        return sum((min(number, each), max(number, each)) in self._left for each in held)

    def _pairs(self, row: Row) -> set[tuple[int, int]]:
        numbers = sorted(self._numbers[level] for level in row.items())
        return set(itertools.combinations(numbers, 2))
