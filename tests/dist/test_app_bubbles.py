"""The bubble benchmark in its smallest form: real processes around a paced engine and learner."""

from pathlib import Path

import pytest
from measured_benchmarks import measured

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_real_runs_keep_the_bound_and_give_what_their_simulation_gives(tmp_path: Path) -> None:
    """Times are not asserted, the machine may be busy; everything else holds at any speed."""
    done, results = measured("async_bubbles.py", tmp_path)
    synchronous, default = results
    assert [synchronous["arm"], default["arm"]] == ["sync, disaggregated", "depth 2, bound 4"]
    for result, bound in ((synchronous, 0), (default, 4)):
        real = result["real"]
        assert real["steps"] >= 2
        assert real["staleness_first"]["max"] <= bound
        assert real["staleness_last"]["max"] <= real["staleness_first"]["max"]
        assert real["dropped"] == 0
        assert 0 <= real["policy_idle"] < 1
        assert 0 < real["swap_ms"]["p50"] <= real["swap_ms"]["max"]
        assert 0 <= real["no_work"] < 1, "an engine that is ahead may never be empty"
    assert synchronous["real"]["no_work"] > 0, "a group is on its way for some time"
    for told in (synchronous["real"], synchronous["predicted"]):
        assert told["withheld"] > 0.2, "engines are empty while the learner trains"
    assert synchronous["real"]["step_s"] > default["predicted"]["step_s"]
    assert "| sync, disaggregated |" in done


def test_a_real_run_with_an_environment_waits_for_it_as_its_simulation_does(tmp_path: Path) -> None:
    """An answer takes a second, so that engines with 24 samples wait for some of their time."""
    done, (result,) = measured("async_bubbles.py", tmp_path, "--environment-latency", "1")
    assert result["arm"] == "depth 2, bound 4, environment 1 s"
    real, predicted = result["real"], result["predicted"]
    assert real["steps"] >= 2
    assert real["dropped"] == 0
    assert real["staleness_first"]["max"] <= 4
    assert real["step_s"] > 1.5 * result["bound_s"]
    assert min(real["environment_wait"], predicted["environment_wait"]) > 0.02
    assert "| waits for the environment |" in done
