"""A process of ours does not outlive the one that started it.

Who starts a child says so in the child's environment. The kernel tells a child when its parent has
gone, which it cannot do for one that was gone before the child asked: it compares then.
"""

import ctypes
import os
import signal
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1
PARENT = "COSMOS_PARENT"


def as_parent() -> Mapping[str, str]:
    """Return what the children of this process find in their environment."""
    return {PARENT: str(os.getpid())}


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel end this process when its parent is gone (Linux only).

    Args:
        by: the signal. SIGKILL ends a process that is stopped, too.
    """
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by)
    except (OSError, AttributeError):
        return
    own = str(os.getppid())
    if os.environ.pop(PARENT, own) != own:  # said to this process, and not to its children
        os.kill(os.getpid(), by)
