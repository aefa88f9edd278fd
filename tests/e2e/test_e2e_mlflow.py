"""A whole run with the MLflow sink, read back by MLflow's client.

Run by `scripts/check_mlflow.sh`, in an environment of its own.
"""

from typing import Any

import pytest

pytest.importorskip("mlflow.tracking")

from real_runs import SMALL, Run, Runner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # those of MLflow's own libraries
]
STEPS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    sinks = "sinks=[{kind='jsonl'}, {kind='mlflow', batch=3}]"
    reward = "reward.rewards=[{kind='length', target=0, limit=32}]"
    runner = Runner(tmp_path_factory.mktemp("mlflow"), forks=True)
    return runner.complete(*SMALL, sinks, reward, f"trainer.steps={STEPS}", "seed=5")


def kept(run: Run) -> tuple[Any, Any]:
    """Return MLflow's client and the one run that it finds."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.output / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("cosmos")
    (found,) = client.search_runs([experiment.experiment_id])
    return client, found


def test_mlflow_has_the_reward_of_every_step(run: Run) -> None:
    client, found = kept(run)
    told = [r for r in run.metrics("controller") if "reward" in r["values"]]
    history = client.get_metric_history(found.info.run_id, "controller/reward")
    assert [(point.step, point.value) for point in history] == [
        (record["step"], record["values"]["reward"]) for record in told
    ]
    assert [point.value for point in history] == run.report["rewards"]
    assert [point.step for point in history] == [*range(STEPS)]


def test_mlflow_has_what_replicas_measured_and_the_recipe_and_knows_that_it_is_over(
    run: Run,
) -> None:
    client, found = kept(run)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == run.output.name
    assert found.data.params["seed"] == "5"
    losses = client.get_metric_history(found.info.run_id, "policy-0/loss")
    assert [point.step for point in losses] == [*range(STEPS)]
