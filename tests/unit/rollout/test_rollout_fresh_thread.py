"""Processes forked from a fresh thread compute, whatever was computed beside it before."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

FORKS = """
import asyncio, os, torch

from cosmos_rollout.fresh_thread import in_fresh_thread

def compute():
    torch.randn(1000, 1000).sort()

def forked():
    child = os.fork()
    if not child:
        compute()
        os._exit(7)
    return os.waitpid(child, 0)[1]

async def main():
    await asyncio.to_thread(compute)  # from now on that thread has helpers
    print(os.waitstatus_to_exitcode(await in_fresh_thread(forked)))

torch.set_num_threads(2)
asyncio.run(main())
"""


def test_a_process_that_is_forked_in_a_fresh_thread_computes_in_parallel():
    """Forked by the thread that computed it would wait for ever."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("7\n", 0), done.stderr
