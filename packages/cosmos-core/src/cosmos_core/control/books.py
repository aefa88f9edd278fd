"""The books: every prompt that was ever issued is consumed, dropped or in flight."""

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
    dropped: dict[str, int]
    in_flight: dict[str, int]

    def check(self) -> None:
        """Check issued = consumed + dropped + in flight.

        Raises:
            BooksError: with the figures, if not.
        """
        total = self.consumed + sum(self.dropped.values()) + sum(self.in_flight.values())
        if total != self.issued:
            raise BooksError(
                f"issued {self.issued} groups but consumed {self.consumed}, dropped "
                f"{self.dropped} and in flight {self.in_flight}: {total}"
            )


def books_of(state: ControllerState) -> Books:
    """Return the books of a state."""
    stages: dict[str, int] = dict.fromkeys(("waiting", "generating", "ready", "training"), 0)
    for group in state.groups.values():
        stages[group.stage] += 1
    return Books(
        issued=state.counters.issued,
        consumed=state.counters.consumed,
        dropped=dict(state.counters.dropped),
        in_flight=stages,
    )
