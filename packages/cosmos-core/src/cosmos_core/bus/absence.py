"""A replica that is given nothing: whether there is a controller at all, and who it was last.

One that is killed is started again, or another takes its lease; meanwhile a replica has nothing to
do but to wait. It says so when that takes long, once, and when there is one again; in the end it
gives up.
"""

from collections.abc import Callable

from cosmos_core.bus.errors import ControllerGoneError

_LOOKS = 6


class Absence:
    """Counts the time without a command, and without a controller.

    Seconds are those in which commands were waited for: who was suspended has not waited.

    Args:
        run: its name, for people.
        say: tells them.
        gone_s: after so long without a controller it is said.
        longest_s: after so long it is an error.
    """

    def __init__(
        self, run: str, say: Callable[[str], None], gone_s: float, longest_s: float
    ) -> None:
        self._run = run
        self._say = say
        self._gone_s = gone_s
        self._longest_s = longest_s
        self._waited_s = 0.0
        self._absent_s = 0.0
        self._last = ""
        self._is_told = False

    def wait(self, waited_s: float) -> bool:
        """Note that commands were waited for in vain; return whether to look who has the lease."""
        self._waited_s += waited_s
        return not self._last or self._waited_s >= self._gone_s / _LOOKS

    def look(self, holder: str) -> bool:
        """Note who has the controller's lease, if somebody has; return whether it was long nobody.

        That is so until it is told.

        Raises:
            ControllerGoneError: if it was nobody for as long as is waited.
        """
        waited_s, self._waited_s = self._waited_s, 0.0
        if holder:
            self._last = holder
            self.end()
            return False
        self._absent_s += waited_s
        if self._absent_s >= self._longest_s:
            raise ControllerGoneError(f"{self._words}: this replica waits no longer")
        return not self._is_told and self._absent_s >= self._gone_s

    def tell(self) -> None:
        """Say that there is no controller."""
        self._is_told = True
        left_s = self._longest_s - self._absent_s
        self._say(
            f"{self._words}: this replica waits for one for another {left_s:.0f} s, and goes on "
            "when it is there"
        )

    @property
    def _words(self) -> str:
        last = f"the last was {self._last!r}" if self._last else "it knew of none"
        return f"the run {self._run!r} has had no controller for {self._absent_s:.0f} s ({last})"

    def end(self) -> None:
        """There is a controller: it has the lease, or has given a command."""
        self._waited_s = self._absent_s = 0.0
        if self._is_told:
            self._is_told = False
            self._say(f"the run {self._run!r} has a controller again")
