"""A temporary directory of a run's own: what killed processes leave in it goes with the run."""

import contextlib
import fcntl
import getpass
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Generator
from pathlib import Path

from cosmos_core.temporary import RUN_PREFIX

_LOCK = "lock"
_PLACE = "TMPDIR"
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_LONGEST = 107 - 1 - 36 - 14
"""A socket's path may have 107 bytes; vLLM's are called by numbers of 36, in folders of 13."""


@contextlib.contextmanager
def own_temporary_directory(machines: Path) -> Generator[None]:
    """Have the processes that are started inside use a directory that goes in the end.

    Goes with it what a launcher left that was killed. What torch compiles stays where other runs
    find it. Under a path too long for sockets, processes use what they would have used.

    Args:
        machines: temporary directory of this machine, in which it is made.
    """
    _sweep(machines)
    folder = Path(tempfile.mkdtemp(prefix=RUN_PREFIX, dir=machines))
    with _locked(folder), contextlib.ExitStack() as ended:
        ended.callback(shutil.rmtree, folder, ignore_errors=True)
        if len(os.fsencode(folder)) <= _LONGEST:
            ended.enter_context(_told(_PLACE, str(folder)))
            if _COMPILED not in os.environ:
                ended.enter_context(_told(_COMPILED, str(machines / _name_of_compiled())))
        yield


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Hold a directory; the kernel lets go of it when this process dies."""
    making = folder / f".{_LOCK}"
    with making.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(socket.gethostname())
        file.flush()
        making.rename(folder / _LOCK)  # now others may ask whether it is held
        yield


def _sweep(machines: Path) -> None:
    """Remove what launchers left that are gone; of other users, nothing can be."""
    for lock in machines.glob(f"{RUN_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("r+") as file:
            if file.read() != socket.gethostname():
                continue  # on a disk that machines share, where locks may be of one alone
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


@contextlib.contextmanager
def _told(name: str, value: str) -> Generator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _name_of_compiled() -> str:
    """Return what torch calls the folder of what it has compiled, in the temporary directory."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as containers have them
        user = f"uid_{os.getuid()}"
    return "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)
