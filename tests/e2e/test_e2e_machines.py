"""The script for SLURM, as it is rendered, runs over several machines: ranks, weights, messages.

The machines are network namespaces; SLURM's own commands are programs that start tasks in them.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import IPV4, IPV6, why_not
from real_runs import QUICKSTART, SMALL, SOURCES, Run, assert_balanced
from slurm import Slurm, slurm

from cosmos_app.event_log import read_events

NUM_STEPS = 16
# one process a machine: two ranks of the policy, the first beside the head, and two rollouts
NUM_MACHINES = 4
SETTINGS = (
    *SMALL,
    f"trainer.steps={NUM_STEPS}",
    "staleness.depth=0",
    "staleness.bound=0",
    "validation.before=false",
    "validation.after=false",
    "model.tiny.hidden_size=256",  # weights outweigh all messages
    "reward.rewards=[{kind='length', target=0, limit=32}]",
    "policy.ranks=2",
    "rollout.replicas=2",
    "bus.lease_s=15",
    "trainer.checkpoint_every=2",
    "dashboard.enabled=false",
    "sinks=[{kind='console'}, {kind='jsonl'}]",
    "cluster.gpus_per_node=1",
)
_LONG_S = 300.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(params=[IPV4, IPV6])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Slurm]:
    if reason := why_not():
        pytest.skip(reason)
    with slurm(NUM_MACHINES, tmp_path / "slurm", request.param) as made:
        yield made


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
        "OMP_NUM_THREADS": "1",
    }


def rendered(output: Path) -> Path:
    """Write the script that a cluster would be handed."""
    command = ["cosmos-app", "run", str(QUICKSTART), f"output={output}", *SETTINGS]
    done = subprocess.run(
        [*command, "--launcher", "slurm", "--dry-run"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    script = output.with_suffix(".sbatch")
    script.write_text(done.stdout)
    return script


def test_a_job_goes_on_without_a_rollout_and_starts_again_without_a_policy(
    cluster: Slurm, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    run = Run(output, cluster.sbatch(rendered(output), environment()))
    run.wait_for(lambda: run.steps_done() >= 1, _LONG_S)
    os.kill(run.child("rollout-1"), signal.SIGKILL)
    alone = run.steps_done() + 3
    run.wait_for(lambda: run.steps_done() >= alone, _LONG_S)
    os.kill(run.child("policy-0"), signal.SIGKILL)
    assert run.finish(_LONG_S) == 0, run.logs()
    log = (tmp_path / "run.slurm-1.log").read_text()
    assert "rollout-1 died: signal 9 (SIGKILL); it is started again in" in log
    steps = [record["step"] for record in run.metrics("controller")]
    assert sorted(set(steps)) == list(range(NUM_STEPS))
    assert steps.count(0) == 1, "it went on from a checkpoint"
    report = run.report
    assert report["steps"] == NUM_STEPS
    assert_balanced(report["books"])
    joined = [e for e in read_events(output / "events.jsonl") if e["type"] == "ReplicaJoined"]
    assert sum(e["replica"] == "policy-0" for e in joined) >= 2
    weights = (output / "export" / "model" / "model.safetensors").stat().st_size
    _, second_rank, *rollouts = (machine.bytes_received() for machine in cluster.machines)
    assert second_rank > NUM_STEPS * weights, "sums of gradients went over the wire"
    assert sum(rollouts) > (NUM_STEPS - 1) * weights, "so did the weights of all versions"
