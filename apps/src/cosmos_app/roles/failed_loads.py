"""A rollout that can load no weights any more begins anew.

A load fails when the policy that serves the weights dies; another is told soon. One that goes on
failing is the fault of who loads: a run would wait for it for ever.
"""

import time
from collections.abc import Callable

from cosmos_app.errors import RunError
from cosmos_core.messages import LoadFailed, VersionLoaded

_FEWEST = 20
_LEAST_S = 120.0


class FailedLoads:
    """Counts loads that failed since the last that did not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """None has failed; ``clock`` gives seconds."""
        self._clock = clock
        self._num = 0
        self._since_s = 0.0

    def note(self, event: VersionLoaded | LoadFailed) -> None:
        """Note how a load ended.

        Raises:
            RunError: if 20 in a row have failed, over two minutes or more: this process is of no
                use, and is to be started anew.
        """
        if isinstance(event, VersionLoaded):
            self._num = 0
            return
        if not self._num:
            self._since_s = self._clock()
        self._num += 1
        lasted_s = self._clock() - self._since_s
        if self._num >= _FEWEST and lasted_s >= _LEAST_S:
            raise RunError(
                f"{self._num} loads of weights in a row have failed for {lasted_s:.0f} s, the last "
                f"with: {event.reason}; this replica ends, to be started anew"
            )
