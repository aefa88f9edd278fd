"""The first thing that runs in SGLang's process: it ends with its owner, whatever ends that.

A script and no module: the Python that runs it has SGLang, and need not have this package.
"""

import os
import runpy
import select
import signal
import sys
import threading


def _die_with(owner: int) -> None:
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os.killpg(0, signal.SIGKILL)
        return
    threading.Thread(target=_wait, args=(descriptor,), name="tether", daemon=True).start()


def _wait(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os.killpg(0, signal.SIGKILL)  # SGLang's workers too: the server leads their group


if __name__ == "__main__":
    _die_with(int(sys.argv[1]))
    key = sys.stdin.read()  # command lines are public
    sys.argv = ["sglang.launch_server", *sys.argv[2:], "--api-key", key]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
