"""What a replica writes down of its own time: spans, one after the other without gaps.

An engine that holds nothing cannot know why. The next group that it is given says for how long
admission withheld one (`Generate`), so its last spans are held back until then::

    note("idle_no_work", 4.0)  note("swap", 4.1)  note("idle_no_work", 6.0)
    given(1.5, now=6.0) ─► idle_no_work to 4.0, swap to 4.1, idle_no_work to 4.5,
                           gated_staleness to 6.0
"""

import threading
from collections.abc import Callable, Iterator, Sequence

from msgspec import structs

from cosmos_core.messages import Role
from cosmos_core.simulation.log import Activity, LogRecord, Span, StepTaken

EMPTY: Activity = "idle_no_work"
WITHHELD: Activity = "gated_staleness"


def told_apart(span: Span, start_s: float, end_s: float) -> Iterator[Span]:
    """Yield a span, with what an empty engine waited between two times as withheld."""
    start_s, end_s = max(span.start_s, start_s), min(span.end_s, end_s)
    if span.activity != EMPTY or end_s <= start_s:
        yield span
        return
    if span.start_s < start_s:
        yield structs.replace(span, end_s=start_s)
    yield structs.replace(span, start_s=start_s, end_s=end_s, activity=WITHHELD)
    if end_s < span.end_s:
        yield structs.replace(span, start_s=end_s)


class Diary:
    """Spans of one replica. Two threads may call it, one of which only says what is `given`.

    Args:
        role: of the replica.
        replica: its name.
        write: takes records that are complete, in order.
        start_s: monotonic seconds at which it begins.

    Attributes:
        until_s: the end of the last span.
    """

    def __init__(
        self,
        role: Role,
        replica: str,
        write: Callable[[Sequence[LogRecord]], None],
        *,
        start_s: float,
    ) -> None:
        self.until_s = start_s
        self._role: Role = role
        self._replica = replica
        self._write = write
        self._held: list[Span] = []
        self._told_s = start_s
        self._withheld: list[tuple[float, float]] = []
        self._lock = threading.Lock()

    def note(
        self,
        activity: Activity,
        end_s: float,
        *,
        version: int,
        width: int = 0,
        tokens: float = 0.0,
    ) -> None:
        """Say what was done since the last note; the same thing once more makes one span."""
        with self._lock:
            start_s, self.until_s = self.until_s, max(end_s, self.until_s)
            if end_s <= start_s:
                return
            span = Span(
                role=self._role,
                replica=self._replica,
                activity=activity,
                start_s=start_s,
                end_s=end_s,
                version=version,
                width=width,
                tokens=tokens,
            )
            self._add(span)
            self._withheld = [each for each in self._withheld if each[1] > self.until_s]

    def given(self, withheld_s: float, now: float) -> None:
        """Say that a group has come, and for how long admission had withheld one until now.

        What was done until now may be noted before or after this.
        """
        with self._lock:
            self._told_s = now
            if withheld_s > 0:
                self._withheld.append((now - withheld_s, now))
                held, self._held = self._held, []
                for span in held:
                    self._add(span)
                if now <= self.until_s:
                    self._withheld.pop()

    def took(self, step: StepTaken) -> None:
        """Say which step was taken."""
        self.close()
        self._write([step])

    def close(self) -> None:
        """Write down all that is held back; more may follow."""
        with self._lock:
            held, self._held = self._held, []
            self._write(held)

    def _add(self, span: Span) -> None:
        """Add a span, in as many parts as it was withheld and not."""
        parts = [span]
        for start_s, end_s in self._withheld:
            parts = [part for each in parts for part in told_apart(each, start_s, end_s)]
        for part in parts:
            self._append(part)

    def _append(self, span: Span) -> None:
        before = self._held[-1] if self._held else None
        if before is not None and _is_same(before, span):
            tokens = before.tokens + span.tokens
            self._held[-1] = structs.replace(before, end_s=span.end_s, tokens=tokens)
            return
        if self._held and not self._may_be_withheld():
            self._write(self._held)
            self._held = []
        self._held.append(span)

    def _may_be_withheld(self) -> bool:
        """Whether it is yet to be told why an engine of what is held back was empty."""
        return any(span.activity == EMPTY and span.end_s > self._told_s for span in self._held)


def _is_same(one: Span, other: Span) -> bool:
    return (one.activity, one.version, one.width) == (other.activity, other.version, other.width)
