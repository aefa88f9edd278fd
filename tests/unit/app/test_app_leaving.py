"""The end of a process of ours, seen in processes of their own."""

import shlex
import subprocess
import sys

import pytest

from cosmos_app.guarded import KILLED_RUN, guarded

_ENDS = """
import atexit, sys, threading, time
from cosmos_app.leaving import leaving

def late():
    time.sleep(0.2)
    print("a thread has ended")

with leaving():
    atexit.register(lambda: print("what was registered ran"))
    threading.Thread(target=late).start()
    {end}
"""
_COMMAND = """
import sys
sys.argv[1:] = ["run", "nowhere.toml"]
import triton
from cosmos_app.__main__ import start
start()
"""
_INTERRUPTED = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[-1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from cosmos_app.__main__ import start
sys.argv.insert(1, "check")
start()
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("sys.exit()", 0),
        ("sys.exit(2)", 2),
        ("sys.exit('a reason')", 1),
        ("raise KeyboardInterrupt", 130),
        ("raise ValueError('unexpected')", 1),
    ],
)
def test_a_process_ends_with_the_code_that_python_has_for_it(end: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENDS.format(end=end)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code
    assert done.stdout.splitlines() == ["a thread has ended", "what was registered ran"]
    assert ("ValueError: unexpected" in done.stderr) == ("ValueError" in end)
    assert ("a reason" in done.stderr) == ("a reason" in end)


def test_a_process_without_an_output_ends_like_others() -> None:
    """As one that is started with ``>&-``."""
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(_ENDS.format(end='pass'))} >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_is_the_last_thing_that_a_command_says() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("module", ["cosmos_app.cli", "cosmos_app.check", "numpy"])
def test_a_ctrl_c_while_modules_are_imported_ends_a_command_without_a_word(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, module], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("killed", ["", KILLED_RUN])
def test_no_command_but_a_run_says_that_a_ctrl_c_has_killed_one(
    killed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def watch() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="130"):
        guarded(watch, killed=killed)
    assert capsys.readouterr().err.strip() == killed


def test_a_ctrl_c_that_is_ignored_stays_ignored_while_modules_are_imported() -> None:
    script = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + _INTERRUPTED
    done = subprocess.run(
        [sys.executable, "-c", script, "cosmos_app.check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
