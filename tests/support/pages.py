"""A recorded run's page, served by ``cosmos-app replay`` and read in a browser."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_runs import SOURCES

_DEADLINE_S = 60.0


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    pytest.fail(f"{what} did not come within {_DEADLINE_S:g} s")


class Replay:
    """A started ``cosmos-app replay``: its address and its token."""

    def __init__(self, run_dir: Path) -> None:
        paths = os.pathsep.join(map(str, SOURCES))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cosmos_app", "replay", str(run_dir)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)", line)
        assert found, line
        self.place, self.token = found[1], found[2]

    def end(self) -> int:
        self.process.terminate()
        self.process.communicate(timeout=_DEADLINE_S)
        return self.process.returncode


def text(browser: Any, selector: str) -> str:
    return browser.execute_script(
        "return document.querySelector(arguments[0])?.textContent ?? ''", selector
    )


def texts(browser: Any, selector: str) -> list[str]:
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector
    )
