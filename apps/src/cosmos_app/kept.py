"""``python -m cosmos_app.kept NAME RESTARTS COMMAND...``: a process of a cluster's job, kept alive.

It is started again when it dies, by the rules of `Supervisor`: after pauses that grow, so often and
no more, and never after a refusal. One that is suspended for ten minutes, or COSMOS_SUSPENDED_S,
has died. SIGTERM ends it for good. It is told since when it is kept: a run that has ended since
then is not waited for.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from cosmos_app.errors import REFUSED
from cosmos_app.process_table import children_of
from cosmos_app.supervisor import Restarts, describe_exit, signal_session
from cosmos_app.suspended import watch_children

KEPT_SINCE = "COSMOS_KEPT_SINCE"
"""Variable of the environment: when the first of them was started, in seconds since 1970."""

_GRACE_S = 60.0


async def keep(name: str, restarts: int, command: Sequence[str]) -> int:
    """Run a command until it finishes, is given up or a signal comes.

    Args:
        name: of the replica, for messages.
        restarts: how often it is started again after it died unasked.
        command: its command line.

    Returns:
        What its last process ended with; for a signal 128 and its number, as shells have it.
    """
    told = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, told.set)
    again = Restarts(restarts)
    environment = {**os.environ, KEPT_SINCE: repr(time.time())}
    watch_children(lambda: dict.fromkeys(children_of(os.getpid()), name))
    while True:
        started = time.monotonic()
        code = await _run(command, environment, told)
        if code == 0 or told.is_set():
            break
        died = f"{name} died: {describe_exit(code)}"
        pause_s = again.pause_after(code, time.monotonic() - started)
        if pause_s is None:
            _say(f"{died}; {_why_given_up(code, restarts)} and is given up")
            break
        _say(f"{died}; it is started again in {pause_s:g} s, {again.left} more times after that")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(told.wait(), pause_s)
        if told.is_set():
            break
    return code if code >= 0 else 128 - code


def _why_given_up(code: int, restarts: int) -> str:
    if code == REFUSED:
        return "it cannot do what it was asked to"
    return f"it was started again {restarts} times (launch.restarts)"


async def _run(command: Sequence[str], environment: Mapping[str, str], told: asyncio.Event) -> int:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True, env=environment
    )
    ending = asyncio.create_task(told.wait())
    living = asyncio.create_task(process.wait())
    await asyncio.wait((ending, living), return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    if not living.done():
        signal_session(process.pid, signal.SIGTERM)
        await asyncio.wait((living,), timeout=_GRACE_S)
    signal_session(process.pid, signal.SIGKILL)  # also what it may have left behind
    return await living


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main() -> int:
    """Keep the command of the arguments alive; return its exit code."""
    name, restarts, *command = sys.argv[1:]
    return asyncio.run(keep(name, int(restarts), command))


if __name__ == "__main__":
    sys.exit(main())
