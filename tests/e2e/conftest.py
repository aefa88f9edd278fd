"""A runner for each test, which leaves nothing running.

Its runs are forked. What is about how runs are started sets ``forks`` to False: they are started as
users start them then.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_runs import Runner


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    started = Runner(tmp_path, forks=True)
    yield started
    for run in started.runs:
        if run.process.poll() is None:
            run.kill()
