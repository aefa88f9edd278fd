"""Taking turns on one set of devices: rollouts generate together, then the policy trains alone.

A lock of the kernel on a file of the run directory, one per machine; whoever dies lets go of it.

    rollouts  ──shared──┐        ┌──shared──
    policy              └─alone──┘
"""

import asyncio
import fcntl
import socket
import time
from pathlib import Path
from typing import IO, Literal

from cosmos_app.errors import RunError
from cosmos_app.roles.process import RunContext

_LOOK_S = 0.005


class Turn:
    """One process's turn on the devices of this machine.

    Args:
        run_dir: of the run.
        side: rollouts have the devices together, the policy has them alone.
        deadline_s: longest to wait for the others.
    """

    def __init__(
        self, run_dir: Path, side: Literal["rollout", "policy"], *, deadline_s: float
    ) -> None:
        self._path = run_dir / f"devices-{socket.gethostname()}.lock"
        self._side = side
        self._deadline_s = deadline_s
        self._file: IO[bytes] | None = None

    @property
    def is_mine(self) -> bool:
        """Whether this process has the devices."""
        return self._file is not None

    async def take(self) -> float:
        """Return, with the seconds it took, when the others have let go. Idempotent.

        Raises:
            RunError: if they did not in time.
        """
        begun = time.monotonic()
        if self._file is not None:
            return 0.0
        file = self._path.open("ab")
        how = fcntl.LOCK_SH if self._side == "rollout" else fcntl.LOCK_EX
        try:
            while not try_lock(file, how):
                if time.monotonic() - begun > self._deadline_s:
                    other = "policy" if self._side == "rollout" else "rollouts"
                    raise RunError(
                        f"waited {self._deadline_s:g} s for the {other} to let go of the devices "
                        f"({self._path})"
                    )
                await asyncio.sleep(_LOOK_S)
        except BaseException:
            file.close()
            raise
        self._file = file
        return time.monotonic() - begun

    def give(self) -> None:
        """Let the others have the devices. Idempotent.

        Processes forked meanwhile, as vLLM's engine is, have the file open too: closing it here
        alone would let go of nothing.
        """
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()
            self._file = None


def policy_turn(context: RunContext) -> Turn | None:
    """Return the turn of a policy whose devices rollouts share, if they do."""
    return _turn(context, "policy")


def rollout_turn(context: RunContext) -> Turn | None:
    """Return the turn of a rollout replica that shares the policy's devices, if it does."""
    return _turn(context, "rollout")


def _turn(context: RunContext, side: Literal["rollout", "policy"]) -> Turn | None:
    chosen = context.recipe.rollout
    if not chosen.colocate:
        return None
    return Turn(context.run.path, side, deadline_s=chosen.turn_deadline_s)


def try_lock(file: IO[bytes], how: int) -> bool:
    """Take a lock of the kernel on an open file if nobody is in the way; return whether.

    Args:
        file: that all who share the lock have opened.
        how: ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.
    """
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
