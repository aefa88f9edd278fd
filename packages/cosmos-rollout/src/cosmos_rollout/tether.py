"""Ties the life of a process to another's, so that ``kill -9`` of the one leaves no orphan."""

import os
import resource
import select
import signal
import threading


def die_with(owner: int) -> None:
    """Kill this process as soon as process ``owner`` has ended, however it ended.

    A thread waits on a pidfd of the owner (Linux 5.3): unlike ``PR_SET_PDEATHSIG`` it does not
    depend on which thread of the owner started this process, and works across a fork server.
    """
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    watch = threading.Thread(target=_wait, args=(descriptor,), name="tether", daemon=True)
    watch.start()


def start_worker(owner: int, memory_bytes: int) -> None:
    """Tie a worker process to its owner and limit its data memory (0: no limit)."""
    die_with(owner)
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def _wait(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
