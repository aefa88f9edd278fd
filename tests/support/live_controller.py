"""A real controller's process with its Redis and dashboard, for replicas that a test plays."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_runs import SOURCES

from cosmos_app.control_files import write_address, write_control
from cosmos_core.bus import RedisServer
from cosmos_core.control import ControllerConfig, StalenessConfig
from cosmos_core.rundir import RunDirectory

DEADLINE_S = 60.0
ONE_STEP = ControllerConfig(
    num_steps=1,
    groups_per_step=2,
    samples_per_group=1,
    staleness=StalenessConfig(depth=0, bound=0),
    lease_s=120.0,
    first_lease_s=120.0,
)


class ControllerProcess:
    """A run directory with its Redis, and ``cosmos-app controller`` on it, started any time."""

    def __init__(
        self, path: Path, dashboard: dict[str, Any], control: ControllerConfig = ONE_STEP
    ) -> None:
        config = json.dumps({"kind": "rl", "dashboard": dashboard})
        self.run = RunDirectory.create(path, config_json=config, now_s=time.time())
        self.server = RedisServer.start(self.run.redis)
        write_address(self.run, self.server.url, "live")
        write_control(self.run, control, b"")
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str | None = "controller") -> subprocess.Popen[bytes]:
        """Start a controller, as the launcher does, or as one does by hand without a name."""
        paths = os.pathsep.join(map(str, SOURCES))
        with (self.run.logs / f"{name or 'by-hand'}.log").open("ab") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "cosmos_app",
                    "controller",
                    str(self.run.path),
                    *(["--name", name] if name else []),
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def ask(self, path: str) -> Any:
        """Ask the dashboard that the run directory names; none while it does not answer."""
        try:
            address = json.loads((self.run.path / "dashboard.json").read_text())
            place = address["url"].partition("/?")[0]
            headers = {"Authorization": f"Bearer {address['token']}"}
            request = urllib.request.Request(place + path, headers=headers)
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            error.close()
            return None
        except (OSError, ValueError):
            return None

    async def wait_for(self, path: str, holds: Callable[[Any], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        found = None
        while time.monotonic() < deadline:
            found = await asyncio.to_thread(self.ask, path)
            if found is not None and holds(found):
                return found
            await asyncio.sleep(0.2)
        logs = [log.read_text()[-1500:] for log in self.run.logs.glob("*.log")]
        pytest.fail(f"{path} did not come to it in {DEADLINE_S:g} s: {found}\n{logs}")

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.server.stop()
        self.run.close()
