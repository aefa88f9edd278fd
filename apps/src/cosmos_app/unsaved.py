"""Checkpoints that cannot be written, as on a full disk: a run goes on without, and its end waits.

The checkpoints before are as they were, and the next one is due soon. After the last step there is
none: it is tried again for an hour.
"""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Mapping

from cosmos_core.metrics import MetricRecord
from cosmos_parallel import CheckpointWriteError

Save = Callable[[], Awaitable[str]]
Report = Callable[[Mapping[str, float]], Awaitable[None]]
HowToSave = Callable[[Save, Report], Awaitable[str | None]]

FAILED = "checkpoint_failed"
"""Measurement of who saves: 1 after a step whose checkpoint was not written, 0 once one is."""
_PAUSE_S = 10.0
_LAST_TRIES = 360


class Saves:
    """The saves of one process, which remembers whether the last one failed."""

    def __init__(self, *, pause_s: float = _PAUSE_S) -> None:
        """None has failed; ``pause_s`` is between two tries of the last one."""
        self._pause_s = pause_s
        self._is_failing = False

    def measured(self, error: CheckpointWriteError | None) -> dict[str, float]:
        """Note how a save went; return what is to be measured: nothing as long as all is well."""
        was_failing, self._is_failing = self._is_failing, error is not None
        if error is not None:
            tell(error)
        return {FAILED: float(self._is_failing)} if was_failing or self._is_failing else {}

    async def in_passing(self, save: Save, report: Report) -> str | None:
        """Return the path of a checkpoint, or ``None`` if it was not written.

        Args:
            save: writes it, or has nothing to write and returns an empty path; all ranks call it,
                and it fails for all of them.
            report: tells of the measurement.
        """
        path, failure = None, None
        try:
            path = await save()
        except CheckpointWriteError as error:
            failure = error
        if path != "" and (values := self.measured(failure)):
            await report(values)
        return path

    async def at_last(self, save: Save, report: Report) -> str:
        """Return the path of the last checkpoint of a run, tried as long as is sensible.

        Raises:
            CheckpointWriteError: if it could not be written in 360 tries.
        """
        for _ in range(_LAST_TRIES - 1):
            path = await self.in_passing(save, report)
            if path is not None:
                return path
            await asyncio.sleep(self._pause_s)
        return await save()


def tell(error: CheckpointWriteError) -> None:
    """Write to this process's log, which may be on that disk, that a checkpoint was not written."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()


class UnsavedWarning:
    """Says to who started a run that a checkpoint was not written, and when one is again.

    Args:
        say: says it.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._is_failing = False

    def look(self, record: MetricRecord) -> None:
        """Take a measurement in."""
        if FAILED not in record.values:
            return
        step, is_failing = record.step + 1, bool(record.values[FAILED])
        if is_failing and not self._is_failing:
            self._say(
                f"[yellow]{record.replica} cannot write the checkpoint after step {step}; the one "
                f"before stays, and it is tried again: see logs/{record.replica}.log, and whether "
                "there is room for it[/]"
            )
        elif self._is_failing and not is_failing:
            self._say(f"{record.replica} wrote the checkpoint after step {step}")
        self._is_failing = is_failing
