"""A run that stands still says what it waits for where it was started, and that it goes on."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_runs import SMALL, SOURCES, SUMS, Run, Runner, assert_balanced

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CTRL_C = b"\x03"
STILL = re.compile(
    r"nothing has happened for \d+ s; the run waits for "
    r"(?:group train\.0\.\d+ on|version \d+ to load on) rollout-0"
)
COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
WORDS = (*SMALL, "trainer.steps=200", "validation.before=false", "validation.after=false")


def said_in(path: Path) -> str:
    return COLOURS.sub("", path.read_text(errors="replace"))


def goes_on(text: str) -> bool:
    """Whether it is said behind what the run stood still for; it may be of its start too."""
    found = STILL.search(text)
    return found is not None and "it goes on after" in text[found.end() :]


def stop_and_go_on(run: Run, said: Path) -> None:
    """Suspend the only rollout until that is told, then let it go on."""
    run.wait_for(lambda: run.steps_done() >= 2)
    rollout = run.child("rollout-0")
    os.kill(rollout, signal.SIGSTOP)
    try:
        run.wait_for(lambda: STILL.search(said_in(said)) is not None)
    finally:
        os.kill(rollout, signal.SIGCONT)
    run.wait_for(lambda: goes_on(said_in(said)))


def test_it_is_a_line_where_there_is_no_terminal(runner: Runner) -> None:
    run = runner.start(*WORDS)
    said = runner.folder / "said-0.txt"
    stop_and_go_on(run, said)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.finish() == 3, run.logs()
    text = said.read_text()
    assert len(STILL.findall(text)) == 1, "once"
    assert "step 1/200" in text


# Begins a session, whose terminal is what it has as its input, and starts what follows in it.
LOGIN = "import os, sys; os.login_tty(0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


class OnTerminal:
    """A run whose terminal is ours, which it is in the foreground of.

    What it shows is written to a file.
    """

    def __init__(self, folder: Path) -> None:
        self.shown = folder / "shown.txt"
        self.shown.touch()
        own, its = pty.openpty()
        output = folder / "run"
        command = ["-m", "cosmos_app", "run", str(SUMS), f"output={output}", *WORDS]
        process = subprocess.Popen(
            [sys.executable, "-c", LOGIN, *command],
            stdin=its,
            stdout=its,
            stderr=its,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
                "COLUMNS": "200",
                "TERM": "xterm",
            },
            cwd=folder,
        )
        os.close(its)
        self._own = own
        self.code = -1
        self.run = Run(output, process)
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def press(self, key: bytes) -> None:
        os.write(self._own, key)

    def close(self) -> None:
        if self.run.process.poll() is None:
            self.run.kill()
        self._reading.join(30)

    def _read(self) -> None:
        with self.shown.open("ab", buffering=0) as shown:
            while True:
                try:
                    data = os.read(self._own, 65536)
                except OSError:  # all that had it open have ended
                    data = b""
                if not data:
                    os.close(self._own)
                    return
                shown.write(data)


@pytest.fixture(scope="module")
def on_terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnTerminal]:
    """One that stood still, went on, and was ended as terminals end what is in the foreground."""
    started = OnTerminal(tmp_path_factory.mktemp("terminal"))
    try:
        stop_and_go_on(started.run, started.shown)
        started.press(CTRL_C)
        started.code = started.run.finish()
        yield started
    finally:
        started.close()


def test_it_stands_above_the_bar_of_a_terminal(on_terminal: OnTerminal) -> None:
    assert "/200" in said_in(on_terminal.shown)
    assert "\u2501" in said_in(on_terminal.shown), "the bar is drawn"


def test_ctrl_c_at_a_terminal_ends_the_run_with_a_checkpoint(on_terminal: OnTerminal) -> None:
    run, text = on_terminal.run, said_in(on_terminal.shown)
    assert on_terminal.code == 3, run.logs()
    assert "stopping after the step in hand; Ctrl-C again kills" in text
    assert "Traceback" not in text + run.logs()
    assert 2 <= run.report["steps"] == run.steps_done() < 200
    assert run.report["incidents"] == [], "none but the launcher was told by the terminal"
    assert_balanced(run.report["books"])
    saved = [path.name for path in (run.output / "checkpoints").iterdir()]
    assert saved == [f"step-{run.steps_done() - 1:08d}"], "that of the last step, counted from 0"
