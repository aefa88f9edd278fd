"""The books: every prompt that was ever issued is consumed, dropped or in flight."""

from collections.abc import Mapping
from dataclasses import dataclass

from cosmos_core.control.state import ControllerState
from cosmos_core.errors import CosmosError


class BooksError(CosmosError):
    """Raised when the books do not balance: a fault of the controller itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Books:
    """Training groups by what became of them.

    Attributes:
        issued: prompts ever issued.
        consumed: trained on in a committed step.
        dropped: given up, by reason.
        in_flight: by stage: waiting, generating, ready, training.
    """

    issued: int
    consumed: int
    dropped: Mapping[str, int]
    in_flight: Mapping[str, int]

    def check(self) -> None:
        """Check issued = consumed + dropped + in flight.

        Raises:
            BooksError: with the figures, if not.
        """
        total = self.consumed + sum(self.dropped.values()) + sum(self.in_flight.values())
        if total != self.issued or min(self.in_flight.values()) < 0:
            raise BooksError(
                f"issued {self.issued} groups but consumed {self.consumed}, dropped "
                f"{dict(self.dropped)} and in flight {dict(self.in_flight)}: {total}"
            )


def audit(state: ControllerState) -> Books:
    """Count every group of a state anew; what the running counts must agree with."""
    in_flight = dict[str, int]()
    for stage in ("waiting", "generating", "ready", "training"):
        in_flight[stage] = sum(group.stage == stage for group in state.groups.values())
    return books_of(state, in_flight)


def books_of(state: ControllerState, in_flight: Mapping[str, int]) -> Books:
    """Return the books of a state whose groups in flight are counted already."""
    return Books(
        issued=state.counters.issued,
        consumed=state.counters.consumed,
        dropped=dict(state.counters.dropped),
        in_flight=in_flight,
    )
