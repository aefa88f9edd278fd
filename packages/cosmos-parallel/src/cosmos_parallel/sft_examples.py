"""What supervised rows become: examples of tokens, and a data set of them."""

from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from cosmos_parallel.example_mixture import ExampleMixture
from cosmos_parallel.pictures import PictureReader


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SftExample:
    """One example of T tokens.

    Attributes:
        token_ids: int32[T].
        trainable: bool[T], true where the model should have said the token.
        images: references of its pictures, in the order of their tokens.
        name: the row's place in its file, for errors of pictures; may be empty.
    """

    token_ids: npt.NDArray[np.int32]
    trainable: npt.NDArray[np.bool_]
    images: tuple[str, ...] = ()
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SftData:
    """A data set in memory; pictures stay where they are until a batch needs them.

    Attributes:
        examples: in the order of the file.
        num_dropped: examples left out because they were longer than allowed.
        reader: what shows the pictures to the model; ``None`` for a model that sees none.
        row_sizes: how many examples each row that has any is, in order; empty for one of each.
        mixture: the data sets whose examples follow one another, and take turns; ``None`` where
            all examples are drawn alike.
    """

    examples: tuple[SftExample, ...]
    num_dropped: int = 0
    reader: PictureReader | None = None
    row_sizes: tuple[int, ...] = ()
    mixture: ExampleMixture | None = None

    def by_row(self) -> list[tuple[SftExample, ...]]:
        """Return the examples of each row: those of one conversation belong together."""
        sizes, left = self.row_sizes or (1,) * len(self.examples), iter(self.examples)
        return [tuple(islice(left, size)) for size in sizes]
