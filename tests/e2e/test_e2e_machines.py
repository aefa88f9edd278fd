"""The script for SLURM, as it is rendered, runs over several machines: ranks, weights, messages.

The machines are network namespaces; SLURM is the real one, its daemons run in them.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machines import IPV4, IPV6
from real_runs import SMALL, SOURCES, SUMS, Run, assert_balanced
from slurm import Slurm, skip_without_cluster, slurm

from cosmos_app.event_log import read_events

NUM_STEPS = 16
# a run is stopped before, however long a replica takes to be there again
NEVER_TAKEN = 2000
# without deaths
FEWER_STEPS = 4
# one process a machine: two ranks of the policy, the first beside the head, and two rollouts
NUM_MACHINES = 4
SETTINGS = (
    *SMALL,
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


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Slurm]:
    skip_without_cluster()
    with slurm(NUM_MACHINES, tmp_path / "slurm", request.param) as made:
        yield made


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
        "OMP_NUM_THREADS": "1",
    }


def submission(output: Path, num_steps: int, *others: str) -> list[str]:
    """Return the command that hands a run to the cluster."""
    changes = (f"output={output}", f"trainer.steps={num_steps}", *SETTINGS, *others)
    return ["cosmos-app", "run", str(SUMS), *changes, "--launcher", "slurm"]


def rendered(output: Path, num_steps: int, *others: str) -> Path:
    """Write the script that a cluster would be handed."""
    done = subprocess.run(
        [*submission(output, num_steps, *others), "--dry-run"],
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


def assert_finishes(run: Run, num_steps: int) -> None:
    """Wait for the end of a job, all steps of which are to be in its books."""
    assert run.finish(_LONG_S) == 0, run.logs()
    steps = [record["step"] for record in run.metrics("controller")]
    assert sorted(set(steps)) == list(range(num_steps))
    assert run.report["steps"] == num_steps
    assert_balanced(run.report["books"])


def assert_carried(cluster: Slurm, output: Path, num_steps: int) -> None:
    """Hold that ranks and replicas met over the wire between the machines."""
    weights = (output / "export" / "model" / "model.safetensors").stat().st_size
    _, second_rank, *rollouts = (machine.bytes_received() for machine in cluster.machines)
    assert second_rank > num_steps * weights, "sums of gradients went over the wire"
    assert sum(rollouts) > (num_steps - 1) * weights, "so did the weights of all versions"


@pytest.mark.parametrize("cluster", [IPV4], indirect=True)
def test_a_job_goes_on_without_a_rollout_and_starts_again_without_a_policy(
    cluster: Slurm, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    run = Run(output, cluster.sbatch(rendered(output, NUM_STEPS), environment()))
    run.wait_for(lambda: run.steps_done() >= 1, _LONG_S)
    os.kill(run.child("rollout-1"), signal.SIGKILL)
    alone = run.steps_done() + 3
    run.wait_for(lambda: run.steps_done() >= alone, _LONG_S)
    os.kill(run.child("policy-0"), signal.SIGKILL)
    assert_finishes(run, NUM_STEPS)
    log = (tmp_path / "run.slurm-1.log").read_text()
    assert "rollout-1 died: signal 9 (SIGKILL); it is started again in" in log
    steps = [record["step"] for record in run.metrics("controller")]
    assert steps.count(0) == 1, "it went on from a checkpoint"
    joined = [e for e in read_events(output / "events.jsonl") if e["type"] == "ReplicaJoined"]
    assert sum(e["replica"] == "policy-0" for e in joined) >= 2
    assert_carried(cluster, output, NUM_STEPS)


@pytest.mark.parametrize("cluster", [IPV4], indirect=True)
def test_a_job_that_is_asked_to_stop_ends_with_a_checkpoint_and_goes_on_when_submitted_again(
    cluster: Slurm, tmp_path: Path
) -> None:
    """Two rollouts share a machine; the name of the run directory is no word of a shell's.

    The command itself submits it first, and the script that it leaves is submitted again.
    """
    output = tmp_path / "my 100% run"
    sizes = ("policy.ranks=1", "cluster.gpus_per_node=2", "cluster.directives=['--comment=ours']")
    command = submission(output, NUM_STEPS, *sizes)
    process, said = cluster.submitted_by(command, tmp_path, environment())
    script = output.with_suffix(".sbatch")
    assert f"submitted {script}; 'cosmos-app status {output}' shows how it is doing\n" in said
    run = Run(output, process)
    run.wait_for(lambda: run.steps_done() >= 2, _LONG_S)
    assert "Comment=ours" in cluster.ask("scontrol", "show", "job", "1")
    cluster.ask("scancel", "--signal=TERM", "--batch", "1")
    assert run.finish(_LONG_S) == 3, run.logs()
    done = run.report["steps"]
    assert 2 <= done < NUM_STEPS
    assert_balanced(run.report["books"])
    assert_finishes(Run(output, cluster.sbatch(script, environment())), NUM_STEPS)
    joined = [e for e in read_events(output / "events.jsonl") if e["type"] == "ReplicaJoined"]
    assert {e["replica"] for e in joined} == {"policy-0", "rollout-0", "rollout-1"}


@pytest.mark.thorough
@pytest.mark.parametrize("cluster", [IPV6], indirect=True)
def test_a_job_runs_where_machines_have_no_ipv4(cluster: Slurm, tmp_path: Path) -> None:
    output = tmp_path / "run"
    script = rendered(output, FEWER_STEPS)
    assert_finishes(Run(output, cluster.sbatch(script, environment())), FEWER_STEPS)
    assert_carried(cluster, output, FEWER_STEPS)


@pytest.mark.parametrize("cluster", [IPV4], indirect=True)
def test_a_version_leaves_the_policy_once_and_goes_from_rollout_to_rollout(
    cluster: Slurm, tmp_path: Path
) -> None:
    """Three rollouts are a chain of machines; one of them is killed on the way."""
    output = tmp_path / "run"
    script = rendered(output, NEVER_TAKEN, "policy.ranks=1", "rollout.replicas=3")
    run = Run(output, cluster.sbatch(script, environment()))
    run.wait_for(lambda: run.steps_done() >= 2, _LONG_S)
    weights = (output / "model" / "model.safetensors").stat().st_size
    begun, sent_before = run.steps_done(), cluster.machines[0].bytes_sent()
    came_before = [machine.bytes_received() for machine in cluster.machines[1:]]
    run.wait_for(lambda: run.steps_done() >= begun + 4, _LONG_S)
    num_versions = run.steps_done() - begun
    sent = cluster.machines[0].bytes_sent() - sent_before
    came = [machine.bytes_received() for machine in cluster.machines[1:]]
    assert all(
        now - before > (num_versions - 2) * weights  # one is on its way
        for now, before in zip(came, came_before, strict=True)
    ), "every rollout got every version"
    assert sent < 1.6 * (num_versions + 1) * weights, "and the policy sent each once"
    os.kill(run.child("rollout-1"), signal.SIGKILL)
    run.wait_for(lambda: bool(holders_of_newcomer(output, "rollout-1")), _LONG_S)
    cluster.ask("scancel", "--signal=TERM", "--batch", "1")
    assert run.finish(_LONG_S) == 3, run.logs()
    assert_balanced(run.report["books"])
    holders: dict[tuple[int, float], dict[str, str]] = {}
    first_holders: dict[str, str] = {}
    for event in read_events(output / "events.jsonl"):
        if event["type"] == "LoadVersion":
            # who is late, or failed, is sent to the policy by an order of its own
            orders = holders.setdefault((event["version"], event["time_s"]), {})
            orders[event["replica"]] = event["holder"]
            first_holders.setdefault(event["replica"], event["holder"])
    assert sorted(map(bool, first_holders.values())) == [False, True, True], "nor more at first"
    assert holders_of_newcomer(output, "rollout-1")[0] in {"rollout-0", "rollout-2"}
    of_all = [each for each in holders.values() if len(each) == 3]
    assert of_all, "all were told of a version at once"
    for each in of_all:
        order = [name for name, holder in each.items() if not holder]
        while after := [name for name, holder in each.items() if holder == order[-1]]:
            order += after
        assert len(order) == 3, f"one from the policy, and a chain: {each}"


def holders_of_newcomer(output: Path, replica: str) -> list[str]:
    """Return who was to send a replica that was started again the versions that it had since."""
    of_it = [e for e in read_events(output / "events.jsonl") if e.get("replica") == replica]
    lives = list(dict.fromkeys(e["incarnation"] for e in of_it if "incarnation" in e))
    assert len(lives) <= 2
    begun = False
    holders: list[str] = []
    for event in of_it:
        begun = begun or (len(lives) == 2 and event.get("incarnation") == lives[1])
        if begun and event["type"] == "LoadVersion":
            holders.append(event["holder"])
    return holders


# Mbit a second: a version of 4 MB is on its way for many steps, to each of two rollouts for longer
SLOW_LINKS = (2.0, 1.2)
BOUND = 4
NUM_SKIPPED = 2
# for how long versions are read at least: several times what a publication may take
STILL_READ_S = 3.0
# so many that links which are fast again are made use of before the last
MANY_STEPS = 64


def shown_status(cluster: Slurm, output: Path) -> dict[str, Any]:
    command = cluster.machines[0].command("cosmos-app", "status", str(output), "--json")
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout)


def assert_only_what_is_published_is_ordered(output: Path) -> None:
    published = {0}
    for event in read_events(output / "events.jsonl"):
        if event["type"] == "VersionPublished":
            published.add(event["version"])
        elif event["type"] == "LoadVersion":
            assert event["version"] in published


@pytest.mark.parametrize("cluster", [IPV4], indirect=True)
def test_rollouts_that_fetch_slowly_hold_no_step_up(cluster: Slurm, tmp_path: Path) -> None:
    """A policy rank has room for two versions; each of two rollouts fetches one of its own."""
    output = tmp_path / "run"
    given = ("staleness.depth=2", f"staleness.bound={BOUND}", "weight_sync.snapshots=2")
    last = ("validation={before=false, after=true, samples=4, temperature=1.0}",)
    script = rendered(output, MANY_STEPS, *given, *last)
    rollouts = cluster.machines[2:]
    for machine, mbit in zip(rollouts, SLOW_LINKS, strict=True):
        machine.slow_down(mbit)
    run = Run(output, cluster.sbatch(script, environment()))

    def num_skipped() -> float:
        return sum(r["values"].get("publications_skipped", 0.0) for r in run.metrics("policy"))

    def num_shown() -> int:
        return shown_status(cluster, output)["replicas"]["policy-0"]["skipped"]

    run.wait_for(lambda: num_skipped() >= NUM_SKIPPED, _LONG_S)
    skipped_s = time.monotonic()
    run.wait_for(lambda: num_shown() >= NUM_SKIPPED)  # the controller says it twice a second
    run.wait_for(lambda: time.monotonic() - skipped_s >= STILL_READ_S)
    for machine in rollouts:
        machine.speed_up()

    def have_caught_up() -> bool:
        events = list(read_events(output / "events.jsonl"))
        skipped = [e["version"] for e in events if e["type"] == "PublicationSkipped"]
        loaded = {e["replica"]: e["version"] for e in events if e["type"] == "VersionLoaded"}
        return len(loaded) == 2 and min(loaded.values()) > max(skipped)

    run.wait_for(have_caught_up, _LONG_S)
    assert_finishes(run, MANY_STEPS)
    report, events = run.report, list(read_events(output / "events.jsonl"))
    skipped = [event for event in events if event["type"] == "PublicationSkipped"]
    assert report["publications_skipped"] == len(skipped)
    for event in skipped:
        assert len(set(re.findall(r"version (\d+) by receiver at", event["held_by"]))) == 2
    assert report["transfer_ms"][1] > 1000.0 * STILL_READ_S
    assert report["publish_ms"][0] < 100.0
    assert report["publish_ms"][1] < 1000.0, "for one of these, training would wait"
    assert report["staleness"][1] <= BOUND
    assert_only_what_is_published_is_ordered(output)
