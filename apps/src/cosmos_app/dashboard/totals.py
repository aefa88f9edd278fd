"""Sums of a run's books that only grow, as what Prometheus calls a counter has to.

Groups that were trained on are so no longer when a policy falls back to a checkpoint, and are
trained on again: a counter that falls is taken for one that began again at 0.
"""

from collections.abc import Mapping
from typing import Any


class Totals:
    """How many groups were issued, consumed and dropped as far as is known, lost steps counted.

    Attributes:
        issued: prompts ever issued; ``None`` while no books are known.
        ended: groups by how they ended.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.issued: int | None = None
        self.ended = dict[str, int]()
        self._last = dict[str, int]()

    def take(self, books: Mapping[str, Any]) -> None:
        """Take in the books as they stand, or none."""
        if "issued" not in books:
            return
        self.issued = (self.issued or 0) + self._grown("issued", books["issued"])
        found = {"consumed": books["consumed"]}
        found |= {f"dropped: {reason}": count for reason, count in books["dropped"].items()}
        for how, count in found.items():
            self.ended[how] = self.ended.get(how, 0) + self._grown(how, count)

    def _grown(self, name: str, count: int) -> int:
        before, self._last[name] = self._last.get(name, 0), count
        return max(0, count - before)
