"""A run whose rewards come from a service in another process, which is killed meanwhile."""

import signal
from pathlib import Path

import pytest
from real_runs import SMALL, SUMS, Run, Runner, assert_balanced
from reward_services import start_service
from safetensors.torch import load_file

NUM_STEPS, NUM_GROUPS = 8, 8
# a random model is never right, but its answers have lengths; on policy, its weights are determined
SETTINGS = (
    *SMALL,
    f"trainer.steps={NUM_STEPS}",
    "staleness.depth=0",
    "staleness.bound=0",
    "learner.optimizer={kind='sgd', lr=0.1}",
)
REWARDS = "reward.rewards=[{kind='length', target=0, limit=32}]"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def difference(one: Run, other: Run) -> float:
    """Return by how much the weights that two runs ended with are apart."""
    mine, theirs = (
        load_file(run.output / "export/model/model.safetensors") for run in (one, other)
    )
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def test_a_run_outlives_its_reward_service_and_ends_with_the_weights_of_one_that_had_none(
    runner: Runner, tmp_path: Path
) -> None:
    here = runner.complete(*SETTINGS, REWARDS, name="here")
    service = start_service(tmp_path / "service", str(SUMS), REWARDS)
    asked = f"{{kind='service', url='{service.url}', key_file='{service.key_file}', timeout_s=90}}"
    run = runner.start(
        *SETTINGS, f"reward.rewards=[{asked}]", "reward.timeout_s=100", name="served"
    )
    try:
        run.wait_for(lambda: run.steps_done() >= 3)
        assert service.figure("cosmos_reward_samples_total") >= 3 * NUM_GROUPS * 4
        service.end(signal.SIGKILL)
        service = start_service(
            tmp_path / "service", str(SUMS), REWARDS, "--port", str(service.port)
        )
        assert run.finish() == 0, run.logs()
        assert service.figure("cosmos_reward_samples_total") >= NUM_GROUPS
    finally:
        service.end()

    report = run.report
    assert (report["steps"], report["failures"], report["incidents"]) == (NUM_STEPS, {}, [])
    assert_balanced(report["books"])
    assert report["books"]["consumed"] == NUM_STEPS * NUM_GROUPS
    assert not report["books"]["dropped"]
    assert sorted(record["step"] for record in run.metrics("controller")) == [*range(NUM_STEPS)]
    assert difference(here, run) == 0.0
