"""``python -m cosmos_app.preloading WHERE MODULE...``: imports what replicas do, and forks them.

::

    launcher ──starts──► this process ──forks──► policy-0, rollout-0, rollout-1, ...
            Order ►  ◄ Began, Ended      each with the environment and log of its order

Torch, transformers and an engine are 10 CPU seconds of imports and half a gigabyte, in every
replica and at every restart. Here they are imported once, and replicas share the pages. This
process has one thread, never computes and never touches a device, as neither would come through a
fork.

WHERE is the number of an open socket to the launcher, or the path of one to be made. The latter is
for who starts runs all day: it forks a process like this one for each that comes. Runs find it by
``COSMOS_PRELOADER=PATH``, and begin without imports; replicas with vLLM come from that of
``COSMOS_PRELOADER_VLLM=PATH`` where there is one. They have to be of the same code and environment.

With ``--ahead`` before WHERE it is the process of `ahead`, which forks processes like this one.
"""

import contextlib
import gc
import importlib
import io
import os
import random
import selectors
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import setproctitle

from cosmos_app.ahead import AHEAD, next_wanted
from cosmos_app.fork_orders import FORKED, FORKED_AS, Began, Ended, Order, Unfit
from cosmos_app.gpu_answers import answering_for_gpus
from cosmos_app.kept_modules import begin_imports
from cosmos_app.leaving import leaving
from cosmos_app.parent import PARENT, die_with_parent

_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_OWN_QUESTIONS = "fla"
"""Asks the driver by Triton as it is imported, and keeps lesser answers without CUDA."""
_LOOK_S = 60.0
_CHUNK = 65536


class _Forks:
    """Carries out the orders that come over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        """Nothing is forked yet."""
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._running: dict[int, tuple[int, int]] = {}  # by pidfd: number and pid
        self._text = b""

    def serve(self) -> Order | None:
        """Return its order in each process that is forked, and None here when nobody is left."""
        while True:
            for key, _ in self._selector.select(_LOOK_S):
                if key.fileobj is not self._connection:
                    self._reap(key.fd)
                    continue
                received = self._connection.recv(_CHUNK)
                if not received:
                    return None
                *lines, self._text = (self._text + received).split(b"\n")
                for line in lines:
                    order = msgspec.json.decode(line, type=Order)
                    if self._forks(order):
                        self._close()
                        return order

    def _forks(self, order: Order) -> bool:
        """Fork; return whether this is the new process. It leads a session before it is known."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(reader)
            os.close(writer)
            return True
        os.close(writer)
        os.read(reader, 1)  # ends when the new process has closed its own
        os.close(reader)
        pidfd = os.pidfd_open(pid)
        self._running[pidfd] = order.number, pid
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._say(Began(order.number, pid))
        return False

    def _reap(self, pidfd: int) -> None:
        number, pid = self._running.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._say(Ended(number, os.waitstatus_to_exitcode(status)))

    def _say(self, answer: Began | Ended) -> None:
        with contextlib.suppress(OSError):  # the launcher has gone: what is forked goes with this
            self._connection.sendall(msgspec.json.encode(answer) + b"\n")

    def _close(self) -> None:
        """Let go of what a forked process has no use for."""
        self._selector.close()
        self._connection.close()
        for pidfd in self._running:
            os.close(pidfd)


def _become(order: Order, forker: int) -> None:
    """Make this process what starting its command line would have made it."""
    os.environ[PARENT] = str(forker)
    die_with_parent()
    with Path(os.devnull).open("rb") as nothing, Path(order.log).open("ab") as log:
        os.dup2(nothing.fileno(), 0)
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    if order.environment.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)
            stream.reconfigure(write_through=True)
    os.environ.clear()
    os.environ.update(order.environment)
    os.environ.pop(PARENT, None)  # of the launcher
    os.environ[FORKED_AS] = str(os.getpid())
    os.chdir(order.directory)
    sys.path[0] = order.directory  # as `python -m` has it
    tempfile.tempdir = None
    random.seed()
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed()
    if (threads := order.environment.get("OMP_NUM_THREADS", "")).isdecimal():
        import torch

        torch.set_num_threads(int(threads))
    setproctitle.setproctitle(" ".join(order.argv))
    sys.argv = [f"{FORKED}/__main__.py", *order.argv[3:]]


def _import(modules: Sequence[str]) -> None:
    for wanted in modules:
        module, _, name = wanted.partition(":")
        with contextlib.suppress(Exception):  # who needs it says what is wrong
            imported = importlib.import_module(module)
            if name:
                getattr(imported, name)
    gc.freeze()


def _unfit() -> str:
    """Return why a process that is forked from here could not use GPUs as others do, or nothing."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    if _OWN_QUESTIONS in sys.modules and torch.cuda.is_available():
        return f"{_OWN_QUESTIONS} asks for GPUs as it is imported"
    pid = os.fork()
    if pid == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    _, status = os.waitpid(pid, 0)
    return "a module that they import starts CUDA" if status else ""


def _say_so(why: str, where: str) -> None:
    """Tell a launcher that nothing is forked for it."""
    with _meet(where) as connection, contextlib.suppress(OSError):
        connection.sendall(msgspec.json.encode(Unfit(why)) + b"\n")


def _meet(where: str) -> socket.socket:
    """Return a connection to a launcher; for a path, in a new process for each that comes."""
    if where.isdecimal():
        return socket.socket(fileno=int(where))
    with socket.socket(socket.AF_UNIX) as listener:
        os.umask(0o077)
        listener.bind(where)
        listener.listen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that serve
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                return connection
            connection.close()


def main() -> None:
    """Import, fork what is ordered, and end when the launcher does."""
    die_with_parent(signal.SIGKILL)
    setproctitle.setproctitle("cosmos-app: imports what replicas share")
    is_ahead = sys.argv[1] == AHEAD
    where, *modules = sys.argv[1 + is_ahead :]
    os.environ.setdefault(_NVML, "1")  # modules that look for a GPU must not start CUDA here
    with leaving():
        begin_imports()
        with answering_for_gpus():
            _import(modules)
            if is_ahead:
                found = next_wanted(socket.socket(fileno=int(where)))
                if found is None:
                    return
                wanted, orders = found
                where = str(orders.detach())
                _import(wanted.modules)
        if why := _unfit():
            if where.isdecimal():
                _say_so(why, where)
            return
        connection = _meet(where)
        forker = os.getpid()
        order = _Forks(connection).serve()
        if order is not None:
            _become(order, forker)
            from cosmos_app.cli import main as command

            command()


if __name__ == "__main__":
    main()
