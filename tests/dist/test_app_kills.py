"""The benchmark of kills in its smallest form: everybody is killed once, and nothing is lost."""

from pathlib import Path

import pytest
from measured_benchmarks import measured

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_whoever_is_killed_every_step_is_taken_once_on_groups_of_its_own(tmp_path: Path) -> None:
    said, outcomes = measured("async_kills.py", tmp_path)
    assert [(each["victim"], each["kills"]) for each in outcomes] == [
        ("nobody", 0),
        ("rollout", 1),
        ("controller", 1),
        ("policy", 1),
    ]
    for each in outcomes:
        assert each["issued"] > 0
        assert each["lost"] == each["doubled"] == each["missing"] == 0
    assert "| policy | 1 |" in said
