"""Imports that begin with the command, while its recipe is still to be read.

::

    launcher ──starts──► imports ahead ──forks──► imports for policies ──forks──► policy-0
     torch,               torch,           └────► imports for vLLM     ──forks──► rollout-0, ...
     recipe               recipe

To read a recipe takes torch and most of these packages, four CPU seconds of imports, which every
process that forks replicas needs as well (`preloading`). A second core makes them meanwhile, once
for all of these.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import msgspec

from cosmos_app.fork_orders import PRELOADER
from cosmos_app.parent import PARENT, as_parent, die_with_parent
from cosmos_app.quiet import QUIET

FOR_ALL = ("cosmos_app.cli", "cosmos_app.recipe")
"""What the launcher imports to read a recipe, and every replica too."""

AHEAD = "--ahead"
_LARGEST = 1 << 18  # bytes of a message
_GRACE_S = 1.0
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of GPUs: NVIDIA's, through Windows, AMD's


class Wanted(msgspec.Struct, frozen=True):
    """A process that goes on with imports of its own.

    Attributes:
        modules: see `preloaded.Shared`.
        environment: of these imports, added to what is there.
    """

    modules: list[str]
    environment: dict[str, str]


def start_importing(
    words: Sequence[str], theirs: socket.socket, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process that imports, which takes its orders from a socket (`preloading`).

    Args:
        words: of its command line, the number of the socket among them.
        theirs: its end of the socket.
        environment: of its imports, added to this process's own.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "cosmos_app.preloading", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **as_parent(), **environment},
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
    )


class Ahead:
    """A process that imports what all replicas need, and forks those that import the rest."""

    def __init__(self) -> None:
        """Start it."""
        self._has_forked = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = (AHEAD, str(theirs.fileno()), *FOR_ALL)
            self._process = start_importing(words, theirs, {**QUIET, **_threads()})

    def fork(self, modules: Sequence[str], environment: Mapping[str, str]) -> socket.socket | None:
        """Have a process forked that imports more; return the socket that it takes orders from.

        Args:
            modules: see `preloaded.Shared`.
            environment: of its imports, added to this process's own.

        Returns:
            None if the process that imports is gone.
        """
        own, theirs = socket.socketpair()
        wanted = msgspec.json.encode(Wanted(list(modules), dict(environment)))
        with theirs:
            try:
                socket.send_fds(self._socket, [wanted], [theirs.fileno()])
            except OSError:
                own.close()
                return None
        self._has_forked = True
        return own

    def close(self) -> None:
        """End it, and with it whatever was forked from it."""
        self._socket.close()
        try:
            self._process.wait(_GRACE_S if self._has_forked else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def importing_ahead(*, is_wanted: bool = True) -> Generator[Ahead | None]:
    """Begin imports, of a run whose recipe is to be read now; end who makes them afterwards.

    Args:
        is_wanted: whether replicas may be forked at all. None is given if not, where somebody has
            imported everything already, and to torchrun's ranks.
    """
    is_begun = os.environ.get(PRELOADER) or "TORCHELASTIC_RUN_ID" in os.environ
    if not is_wanted or is_begun or not hasattr(os, "pidfd_open"):
        yield None
        return
    ahead = Ahead()
    try:
        yield ahead
    finally:
        ahead.close()


def _threads() -> Mapping[str, str]:
    """Return how many threads computing begins with, before the recipe says how many are there.

    Replicas have a number of their own; more threads than cores make tiny models slower by far.
    """
    if any(Path(driver).exists() for driver in _DRIVERS):
        return {}
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def next_wanted(control: socket.socket) -> tuple[Wanted, socket.socket] | None:
    """Fork for each that the launcher wants, in the process that has imported what all need.

    Args:
        control: what the launcher says it over.

    Returns:
        What is wanted and the socket to take orders from, in each that is forked. None in the one
        that forks, when the launcher is gone.
    """
    forker = str(os.getpid())
    while True:
        text, sockets, _, _ = socket.recv_fds(control, _LARGEST, 1)
        if not text:
            with contextlib.suppress(ChildProcessError):
                while True:  # so that their processor time is known of this one
                    os.wait()
            return None
        orders = socket.socket(fileno=sockets[0])
        if os.fork() == 0:
            control.close()
            os.setsid()
            os.environ[PARENT] = forker
            die_with_parent(signal.SIGKILL)
            wanted = msgspec.json.decode(text, type=Wanted)
            os.environ.update(wanted.environment)
            return wanted, orders
        orders.close()
