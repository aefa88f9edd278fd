"""Examples of several data sets, of which each has its share of every stretch of them."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from cosmos_core.turns import ShareError, Turn, Turns
from cosmos_parallel.errors import SftDataError


class ExampleMixture:
    """Data sets that take turns by their shares; each goes through its own epochs.

    Places are counted over the examples of all sets, one set after another. Which one the k-th is
    follows from k and the seed alone. A set is gone through once, in a new order, before any of
    its examples comes again, whatever the others do.

    Args:
        sizes: examples of each set, in the order in which the sets follow one another.
        shares: of each set, in any unit; together they are the whole.

    Raises:
        SftDataError: if shares are not those of the sets, a set has no example, a share is not
            positive, or is so small that its set would never have a turn.
    """

    def __init__(self, sizes: Mapping[str, int], shares: Mapping[str, float]) -> None:
        if sizes.keys() != shares.keys():
            raise SftDataError(
                f"a mixture wants one share for each set; there are sets {sorted(sizes)} and "
                f"shares of {sorted(shares)}"
            )
        empty = [name for name, size in sizes.items() if size < 1]
        if empty:
            raise SftDataError(f"data set {empty[0]!r} has no example to train on")
        try:
            self._turns = Turns(shares)
        except ShareError as error:
            raise SftDataError(str(error)) from error
        self.sizes = dict(sizes)
        self.num_examples = sum(sizes.values())
        starts = np.cumsum([0, *sizes.values()]).tolist()
        self._starts: dict[str, int] = dict(zip(sizes, starts, strict=False))

    @property
    def turns(self) -> Mapping[str, int]:
        """How many of each thousand examples are of each set."""
        return self._turns.each

    def drawn(self, count: int) -> dict[str, int]:
        """Return how many of the first ``count`` examples are of each set."""
        return self._turns.before(count)

    def places(self, ordinals: range, seed: int) -> list[int]:
        """Return the place of each of the examples that are drawn as these, counted from 0."""
        orders: dict[tuple[str, int], npt.NDArray[np.int64]] = {}

        def place(turn: Turn) -> int:
            epoch, position = divmod(turn.number, self.sizes[turn.name])
            key = (turn.name, epoch)
            if key not in orders:
                orders[key] = epoch_order(self.sizes[turn.name], seed, epoch, turn.name)
            return self._starts[turn.name] + int(orders[key][position])

        return [place(self._turns.at(ordinal)) for ordinal in ordinals]


def epoch_order(
    num_examples: int, seed: int, epoch: int, data_set: str = ""
) -> npt.NDArray[np.int64]:
    """Return the order int64[N] in which a pass over a data set takes its examples.

    Args:
        num_examples: of the set.
        seed: of the order.
        epoch: which pass, counted from 0.
        data_set: its name, so that sets of one size come in orders of their own.
    """
    generator = np.random.default_rng([seed, epoch, *data_set.encode()])
    return generator.permutation(num_examples)
