"""Sinks that are services: what is said where one is not there, and what it is sent."""

import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from cosmos_core.metrics import MetricRecord, MlflowSinkConfig, SinkContext
from cosmos_core.metrics.batches import Batches
from cosmos_core.rundir import RunDirectory


@pytest.fixture
def context(tmp_path: Path):
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        console = Console(file=io.StringIO(), width=100)
        yield SinkContext(run=run, num_steps=4, console=console, config={"seed": 3})


_ACCOUNTLESS = """
import sys
from pathlib import Path
from rich.console import Console
from cosmos_core.metrics import SinkContext, SinkError, WandbSinkConfig, open_sinks
from cosmos_core.rundir import RunDirectory
run = RunDirectory.create(Path(sys.argv[1]), config_json="{}", now_s=0.0)
context = SinkContext(run=run, num_steps=1, console=Console(), config={})
try:
    open_sinks([WandbSinkConfig(mode="online")], context)
except SinkError as error:
    sys.stdout.write(str(error))
"""
_WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None  # what an import meets on a machine without the extra
from cosmos_core.metrics import (
    MissingExtraError, MlflowSinkConfig, TensorBoardSinkConfig, WandbSinkConfig
)
config = {
    "wandb": WandbSinkConfig, "tensorboard": TensorBoardSinkConfig, "mlflow": MlflowSinkConfig
}[sys.argv[1]]()
try:
    config.build(None)
except MissingExtraError as error:
    sys.stdout.write(str(error))
"""


@pytest.mark.parametrize("module", ["wandb", "tensorboard", "mlflow"])
def test_a_missing_extra_says_what_to_install(module: str, child_environment: dict[str, str]):
    command = [sys.executable, "-c", _WITHOUT, module]
    done = subprocess.run(
        command, env=child_environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f'the {module} sink needs an extra: pip install "cosmos-core[{module}]"'


@pytest.mark.parametrize("num_lost", [0, 1, 2])
def test_what_a_service_did_not_take_is_sent_later_and_once(num_lost: int):
    """A record that was refused is written again, as a run does it, or given up."""
    taken, refusals = list[int](), [ConnectionError()] * num_lost

    def send(points: Sequence[int]) -> None:
        if refusals:
            raise refusals.pop()
        taken.extend(points)

    waiting = Batches[int](send, enough=3, most=2)
    waiting.add([1, 2])
    for _ in range(num_lost):
        with pytest.raises(ConnectionError):
            waiting.add([3])
        assert taken == []
    waiting.add([3])
    assert taken == [1, 2, 3]
    waiting.add([4])
    waiting.flush()
    waiting.flush()
    assert taken == [1, 2, 3, 4]


def test_a_service_without_an_account_is_said_with_its_sink(
    child_environment: dict[str, str], tmp_path: Path
):
    pytest.importorskip("wandb")
    nowhere = {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    environment = {**child_environment, **nowhere}
    environment.pop("WANDB_API_KEY", None)
    done = subprocess.run(
        [sys.executable, "-c", _ACCOUNTLESS, str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("the wandb sink cannot begin: UsageError: ")


@pytest.mark.filterwarnings("ignore")  # those of MLflow's own libraries
def test_mlflow_finds_every_point_at_its_step_and_time(context: SinkContext):
    pytest.importorskip("mlflow.tracking")
    from mlflow.tracking import MlflowClient

    sink = MlflowSinkConfig(batch=2).build(context)
    sink.write(MetricRecord(100.0, "policy", "policy-0", 0, {"loss": 0.5, "grad_norm": 2.0}))
    sink.write(MetricRecord(101.5, "policy", "policy-0", 1, {"loss": 0.25}))
    sink.close()
    sink.close()
    client = MlflowClient(tracking_uri=f"sqlite:///{context.run.path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("cosmos")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "policy-0/loss")
    assert [(p.step, p.timestamp, p.value) for p in history] == [
        (0, 100_000, 0.5),
        (1, 101_500, 0.25),
    ]
    assert run.data.metrics == {"policy-0/loss": 0.25, "policy-0/grad_norm": 2.0}
