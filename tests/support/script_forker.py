"""Imports modules and forks scripts from itself: ``python script_forker.py SOCKET MODULE...``.

SOCKET is the number of an open one. Each message over it is an order of `forked_scripts`: JSON and
four files, the script's standard ones, and one that gets its process id when it begins and how it
ended when it has, a line each. This process has one thread and never computes, as neither would
come through a fork; it ends when the other end of the socket is closed.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LONGEST_ORDER = 1 << 17
_LOOK_S = 60.0


class _Forks:
    """Carries out orders that come over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._running: dict[int, tuple[int, int]] = {}  # by pidfd: its pid, and where that is told

    def serve(self) -> dict[str, Any] | None:
        """Return its order in each process that is forked, and None here when nobody is left."""
        while True:
            for key, _ in self._selector.select(_LOOK_S):
                if key.fileobj is not self._connection:
                    self._reap(key.fd)
                    continue
                text, files, _, _ = socket.recv_fds(self._connection, _LONGEST_ORDER, 4)
                if not text:
                    return None
                if self._is_forked(files):
                    return json.loads(text)

    def _is_forked(self, files: Sequence[int]) -> bool:
        """Fork; return whether this is the new process, which has these files."""
        *standard, told = files
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.write(told, f"{os.getpid()}\n".encode())
            for number, file in enumerate(standard):
                os.dup2(file, number)
            self._selector.close()
            self._connection.close()
            kept = (told for _, told in self._running.values())
            for file in (*files, *self._running, *kept):
                os.close(file)
            return True
        for file in standard:
            os.close(file)
        pidfd = os.pidfd_open(pid)
        self._running[pidfd] = pid, told
        self._selector.register(pidfd, selectors.EVENT_READ)
        return False

    def _reap(self, pidfd: int) -> None:
        pid, told = self._running.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # nobody wants to know
            os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os.close(told)


def _run(order: dict[str, Any]) -> None:
    """Do what Python does that is started with a command line and an environment."""
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["directory"])
    tempfile.tempdir = None
    random.seed()
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed()
    first, *rest = order["command"]
    if first == "-m":
        sys.path[0], sys.argv = str(Path.cwd()), rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(first).parent), [first, *rest]
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    """Import, and fork what is ordered."""
    number, *modules = sys.argv[1:]
    gc.disable()  # a third of what importing torch costs is the collector going through modules
    for module in modules:
        with contextlib.suppress(ImportError):  # who needs it says what is missing
            importlib.import_module(module)
    gc.freeze()
    order = _Forks(socket.socket(fileno=int(number))).serve()
    if order is not None:
        gc.enable()
        gc.set_threshold(50_000)
        _run(order)


if __name__ == "__main__":
    main()
