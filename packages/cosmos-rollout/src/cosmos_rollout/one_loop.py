"""What belongs to one event loop says so, where it would else wait for ever in another."""

import asyncio

from cosmos_rollout.errors import WrongLoopError


class OneLoop:
    """The event loop that something belongs to: that in which it was first used.

    Args:
        what: its name, for errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self) -> None:
        """Refuse any other loop.

        Raises:
            WrongLoopError: if this is another one.
        """
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise WrongLoopError(
                f"{self._what} belongs to the event loop in which it was first used, and this is "
                "another: use one asyncio.run for all of it, or asyncio.Runner().run for each "
                "part; from another thread asyncio.run_coroutine_threadsafe(..., loop)"
            )

    def check_if_runs(self) -> None:
        """Refuse another loop while the one before still runs, in another thread; else move here.

        Raises:
            WrongLoopError: if it runs.
        """
        if self._loop is not None and not self._loop.is_running():
            self._loop = None
        self.check()
