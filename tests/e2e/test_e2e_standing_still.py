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
from real_runs import SMALL, SOURCES, SUMS, Run, Runner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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
    """Suspend the only rollout until that is told, then let it go on, and end the run."""
    run.wait_for(lambda: run.steps_done() >= 2)
    rollout = run.child("rollout-0")
    os.kill(rollout, signal.SIGSTOP)
    try:
        run.wait_for(lambda: STILL.search(said_in(said)) is not None)
    finally:
        os.kill(rollout, signal.SIGCONT)
    run.wait_for(lambda: goes_on(said_in(said)))
    os.kill(run.process.pid, signal.SIGINT)
    assert run.finish() == 3, run.logs()


def test_it_is_a_line_where_there_is_no_terminal(runner: Runner) -> None:
    run = runner.start(*WORDS)
    said = runner.folder / "said-0.txt"
    stop_and_go_on(run, said)
    text = said.read_text()
    assert len(STILL.findall(text)) == 1, "once"
    assert "step 1/200" in text


class OnTerminal:
    """A run whose terminal is ours; what it shows is written to a file."""

    def __init__(self, folder: Path) -> None:
        self.shown = folder / "shown.txt"
        self.shown.touch()
        own, its = pty.openpty()
        output = folder / "run"
        command = [sys.executable, "-m", "cosmos_app", "run", str(SUMS), f"output={output}"]
        process = subprocess.Popen(
            [*command, *WORDS],
            stdin=subprocess.DEVNULL,
            stdout=its,
            stderr=its,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
                "COLUMNS": "200",
                "TERM": "xterm",
            },
            start_new_session=True,
            cwd=folder,
        )
        os.close(its)
        self.run = Run(output, process)
        self._reading = threading.Thread(target=self._read, args=(own,), daemon=True)
        self._reading.start()

    def close(self) -> None:
        if self.run.process.poll() is None:
            self.run.kill()
        self._reading.join(30)

    def _read(self, own: int) -> None:
        with self.shown.open("ab", buffering=0) as shown:
            while True:
                try:
                    data = os.read(own, 65536)
                except OSError:  # all that had it open have ended
                    data = b""
                if not data:
                    os.close(own)
                    return
                shown.write(data)


@pytest.fixture
def on_terminal(tmp_path: Path) -> Iterator[OnTerminal]:
    started = OnTerminal(tmp_path)
    yield started
    started.close()


def test_it_stands_above_the_bar_of_a_terminal(on_terminal: OnTerminal) -> None:
    stop_and_go_on(on_terminal.run, on_terminal.shown)
    assert "/200" in said_in(on_terminal.shown)
    assert "\u2501" in said_in(on_terminal.shown), "the bar is drawn"
