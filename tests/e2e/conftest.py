"""A runner for each test, which leaves nothing running."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_runs import Runner


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    started = Runner(tmp_path)
    yield started
    for run in started.runs:
        if run.process.poll() is None:
            run.kill()
