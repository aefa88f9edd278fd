"""Ties the life of a process to another's, so that ``kill -9`` of the one leaves no orphan."""

import contextlib
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
    """Tie a worker process to its owner and limit its data memory (0: no limit).

    What the worker starts ends with it, unless that has a session of its own: a program that a
    function waits for would otherwise go on when the function is ended for its time.
    """
    os.setpgid(0, 0)
    _end_group_with_me()
    die_with(owner)
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def _end_group_with_me() -> None:
    """Have a process, nobody's child, kill this process's group as soon as its leader has ended."""
    leader = os.getpid()
    descriptor = os.pidfd_open(leader)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os.close(descriptor)
        return
    try:
        if os.fork() == 0:
            os.setpgid(0, 0)
            os.closerange(0, descriptor)  # pipes by whose end others know this process's
            os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
            _ended(descriptor)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
    finally:
        os._exit(0)


def _ended(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()


def _wait(descriptor: int) -> None:
    _ended(descriptor)
    os.kill(os.getpid(), signal.SIGKILL)
