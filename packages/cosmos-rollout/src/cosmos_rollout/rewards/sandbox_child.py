"""The first thing that runs in a sandbox: shuts the doors, then becomes the program.

Run as a file by `sandbox.run_program`, with the standard library alone::

    python -I sandbox_child.py program.py '{"cpu_s": 5, "memory_bytes": ..., ...}'

It leaves the network, and starts the program as process 1 of a name space of its own, whose death
ends whatever the program started. Where the system does not allow name spaces it exits with
`NO_NAMESPACES`, unless it was told that limits alone will do.
"""

import ctypes
import json
import os
import resource
import runpy
import signal
import sys
from typing import Any

NO_NAMESPACES = 117
_NEW_USER, _NEW_PROCESSES, _NEW_NETWORK, _NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_DIE_WITH_PARENT = 1


def limit(settings: dict[str, Any]) -> None:
    """Set what the program may use."""
    memory, file_bytes = settings["memory_bytes"], settings["file_bytes"]
    resource.setrlimit(resource.RLIMIT_CPU, (settings["cpu_s"], settings["cpu_s"] + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def run(program: str) -> None:
    """Become the program."""
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")


def main(program: str, settings: dict[str, Any]) -> int:
    """Run the program in a process of its own if that can be had; return its exit status."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    limit(settings)
    if libc.unshare(_NEW_USER | _NEW_PROCESSES | _NEW_NETWORK | _NEW_IPC) != 0:
        if settings["namespaces"]:
            return NO_NAMESPACES
        run(program)
        return 0
    for _ in range(2):  # process 1 of a name space is deaf to signals; the program is process 2
        child = os.fork()
        if child:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os._exit(status if status >= 0 else 128 - status)
        libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    run(program)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
