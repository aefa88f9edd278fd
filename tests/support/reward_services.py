"""``cosmos-app reward-service`` with a recipe, as a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from processes import descendants, is_alive
from real_runs import SOURCES

from cosmos_rollout import ServiceReward

TOKEN = "a-token-of-some-length"
_LONGEST_S = 120.0


@dataclass
class RewardService:
    """One that has said where it is.

    Attributes:
        url: that samples are sent to.
        key_file: holds its token.
        process: of the command.
        said: file with all that it printed.
    """

    url: str
    key_file: Path
    process: subprocess.Popen[bytes]
    said: Path

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2].partition("/")[0])

    def ask(self, token: str = TOKEN, timeout_s: float = 60.0, **sample: Any) -> httpx.Response:
        """Ask for a sample's reward."""
        headers = {"Authorization": f"Bearer {token}"}
        sample = {"prompt": "", **sample}
        return httpx.post(self.url, json=sample, headers=headers, timeout=timeout_s)

    def figure(self, name: str) -> float:
        """Return one of its figures; those with labels are added up."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        page = httpx.get(self.url.replace("/score", "/metrics"), headers=headers, timeout=60)
        lines = [line.split() for line in page.text.splitlines() if not line.startswith("#")]
        return sum(float(value) for key, value in lines if key.partition("{")[0] == name)

    def reward(self, timeout_s: float = 60.0) -> ServiceReward:
        """Return the settings of a client."""
        return ServiceReward(url=self.url, key_file=self.key_file, timeout_s=timeout_s)

    def below(self) -> set[int]:
        """Return the processes that it has started."""
        return descendants(self.process.pid)

    def end(self, by: signal.Signals = signal.SIGTERM) -> None:
        """End it, and wait for that and for its processes."""
        below = self.below()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(by)
        self.process.wait(_LONGEST_S)
        assert_ended(below)


def assert_ended(pids: set[int], longest_s: float = 20.0) -> None:
    """Wait until none of some processes is left."""
    deadline = time.monotonic() + longest_s
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def start_service(folder: Path, *arguments: str) -> RewardService:
    """Start one; it lies in a folder of its own, whose file ``key`` holds its token."""
    folder.mkdir(parents=True, exist_ok=True)
    key_file, said = folder / "key", folder / "said"
    key_file.write_text(f"{TOKEN}\n")
    words = ["reward-service", *arguments, "--token-file", str(key_file)]
    with said.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "cosmos_app", *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))},
            cwd=folder,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    deadline = time.monotonic() + _LONGEST_S
    while not (url := _told(said)):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise AssertionError(said.read_text())
        time.sleep(0.05)
    return RewardService(url, key_file, process, said)


@contextlib.contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[RewardService]:
    """Have one for the length of a block."""
    service = start_service(folder, *arguments)
    try:
        yield service
    finally:
        service.end()


def _told(said: Path) -> str:
    lines = said.read_text().splitlines()
    return next((line.removeprefix("url: ") for line in lines if line.startswith("url: ")), "")
