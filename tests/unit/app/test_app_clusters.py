"""What a cluster is handed: scripts and manifests as they are, and what scripts really start."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from cosmos_app.cli import main
from cosmos_app.clusters.placement import place
from cosmos_app.recipe import load_recipe

GOLDEN = Path(__file__).parent / "golden"
RECIPE = """\
output = "runs/big"
[policy]
replicas = 2
ranks = 16
[policy.parallel]
dp_shard = 16
[rollout]
replicas = 6
engine = { kind = "vllm", tensor_parallel = 4 }
[cluster]
partition = "gpu"
setup = "source .venv/bin/activate"
image = "registry/cosmos:1"
namespace = "research"
"""

# two teachers of two GPUs each share a machine behind those of the rollouts
TAUGHT = (
    "algorithm.kind=on_policy_distillation",
    "model.teacher=models/large",
    "teacher.replicas=2",
    "teacher.engine.tensor_parallel=2",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rendered(launcher: str, *overrides: str) -> str:
    arguments = ["run", "recipe.toml", *overrides, "--launcher", launcher, "--dry-run"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("launcher", "golden", "overrides"),
    [
        ("slurm", "big.sbatch", ("trainer.steps=7",)),
        ("kubernetes", "big.yaml", ("trainer.steps=7",)),
        ("slurm", "taught.sbatch", TAUGHT),
        ("kubernetes", "taught.yaml", TAUGHT),
    ],
)
def test_a_manifest_is_what_was_looked_at(
    launcher: str, golden: str, overrides: tuple[str, ...]
) -> None:
    assert rendered(launcher, *overrides) == (GOLDEN / golden).read_text()


def test_machines_are_counted(folder: Path) -> None:
    """Two replicas of 16 ranks on 8 GPUs each: 4 machines; six engines of 4 GPUs: 3 machines."""
    placement = place(load_recipe(folder / "recipe.toml"), Path("recipe.toml"), ())
    assert (placement.policy_nodes, placement.rollouts.nodes, placement.nodes) == (2, 3, 7)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster.gpus_per_node=7", "3 machines of cluster.gpus_per_node=7 cannot share evenly"),
        ("rollout.engine.tensor_parallel=16", "rollout.engine needs 16 GPUs"),
        ("teacher.engine.tensor_parallel=16", "teacher.engine needs 16 GPUs"),
        ("cluster.rendezvous_port=80", "want 1024 to 65000"),
    ],
)
def test_what_does_not_fit_is_named(override: str, message: str) -> None:
    arguments = ["run", "recipe.toml", *TAUGHT, override, "--launcher", "slurm", "--dry-run"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


_STAND_INS = {
    # as SLURM's: options are dropped, the rest runs once for each task
    "srun": """
all="$*"; tasks=1
while [[ "$1" == --* ]]; do
  case "$1" in --ntasks=*) tasks="${1#*=}";; esac; shift
done
if [[ "$1" == hostname ]]; then echo "10.0.0.1 "; exit; fi
if ((tasks == 1)); then SLURM_PROCID=0 exec "$@"; fi  # signals reach it
for ((i = 0; i < tasks; i++)); do SLURM_PROCID=$i "$@"; done
""",
    "scontrol": 'printf "node%s\\n" 0 1 2 3 4 5 6 7',
    "hostname": 'echo "10.0.0.9 "',
    # the run is over once the other 12 processes have been started
    "cosmos-app": """
echo "$COSMOS_HOST cosmos-app $*" >> calls
if [[ "$1" == run ]]; then
  for ((i = 0; i < 300 && $(wc -l < calls) < 13; i++)); do sleep 0.1; done
fi
""",
    "python": 'echo "$COSMOS_HOST python $*" >> calls',
}


def start_script(folder: Path, script: str, **changed: str) -> subprocess.Popen[str]:
    """Have bash really run it; the commands of the cluster are stand-ins that note what they do."""
    tools = folder / "tools"
    tools.mkdir()
    for name, text in {**_STAND_INS, **changed}.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[0-7]"}
    return subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_script(folder: Path, script: str, **changed: str) -> tuple[int, str]:
    """Run it to its end; return its exit code and its errors."""
    running = start_script(folder, script, **changed)
    _, errors = running.communicate(timeout=60)
    return running.returncode, errors


def test_the_script_starts_every_process_with_its_names_and_addresses(folder: Path) -> None:
    code, errors = run_script(folder, rendered("slurm", "cluster.setup=:", *TAUGHT))
    assert code == 0, errors
    calls = (folder / "calls").read_text().splitlines()
    started = [call for call in calls if " stop " not in call]
    head = (
        f"10.0.0.1 cosmos-app run recipe.toml cluster.setup=: {' '.join(TAUGHT)} "
        "launch.external=true bus.host=10.0.0.1"
    )
    assert [call.rstrip() for call in started if " run " in call] == [head]
    rollouts = [call for call in started if " rollout " in call]
    assert sorted(rollouts) == [
        f"10.0.0.9 cosmos-app rollout runs/big --replica rollout-{i} --wait 1800" for i in range(6)
    ]
    teachers = [call for call in started if " teacher " in call]
    assert sorted(teachers) == [
        f"10.0.0.9 cosmos-app teacher runs/big --replica teacher-{i} --wait 1800" for i in range(2)
    ]
    ranks = [call for call in started if " python " in call]
    for index in range(2):
        mine = [call for call in ranks if f"--replica policy-{index} " in call]
        assert len(mine) == 2, "one torchrun on each machine"
        assert f"--rdzv-endpoint=10.0.0.1:{29500 + index}" in mine[0]
        assert "--nnodes=2 --nproc-per-node=8" in mine[0]


# until it is told to stop, as the head of a run
_WAITING_HEAD = """
echo "cosmos-app $*" >> calls
case "$1" in
  run)
    mkdir -p runs/big; touch runs/big/run.json
    if [[ "$*" == *--resume* ]]; then exit 0; fi
    for ((i = 0; i < 300; i++)); do [[ -e stopped ]] && exit 3; sleep 0.1; done;;
  stop) touch stopped;;
esac
"""
_ALONE = ("cluster.setup=:", "policy.replicas=1", "policy.ranks=8", "policy.parallel.dp_shard=8")


def heads(folder: Path) -> list[str]:
    calls = (folder / "calls").read_text().splitlines()
    return [call for call in calls if call.startswith("cosmos-app run")]


def test_all_start_again_from_the_newest_checkpoint_without_a_policy(folder: Path) -> None:
    """The policy fails at its first start alone."""
    python = "if [[ -e failed ]]; then exit 0; fi; touch failed; exit 7"
    script = rendered("slurm", *_ALONE)
    code, errors = run_script(folder, script, **{"cosmos-app": _WAITING_HEAD, "python": python})
    assert code == 0, errors
    assert "a policy replica ended with 7: all start again" in errors
    assert [call.endswith("--resume") for call in heads(folder)] == [False, True]


@pytest.mark.parametrize(
    ("override", "code"), [("cluster.max_restarts=0", 7), ("cluster.max_restarts=3", 2)]
)
def test_a_job_ends_with_a_policy_that_may_not_or_cannot_start_again(
    folder: Path, override: str, code: int
) -> None:
    """2 says that the recipe is wrong."""
    changed = {"cosmos-app": _WAITING_HEAD, "python": f"exit {code}"}
    found, errors = run_script(folder, rendered("slurm", *_ALONE, override), **changed)
    assert found == code, errors
    assert len(heads(folder)) == 1


@pytest.mark.usefixtures("folder")
def test_elastic_policies_go_on_without_one_that_is_lost() -> None:
    assert "policies+=($!)" in rendered("slurm", *_ALONE)
    assert "policies+=($!)" not in rendered("slurm", *_ALONE, "elastic.lease_s=5")


def test_the_signal_before_the_limit_stops_the_run_and_nothing_starts_again(folder: Path) -> None:
    running = start_script(folder, rendered("slurm", *_ALONE), **{"cosmos-app": _WAITING_HEAD})
    for _ in range(300):
        if (folder / "runs" / "big" / "run.json").exists():
            break
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 3, errors
    assert "cosmos-app stop runs/big --wait 0" in (folder / "calls").read_text()
    assert len(heads(folder)) == 1


def test_the_jobset_gives_every_pod_what_it_needs(folder: Path) -> None:
    del folder
    manifest: dict[str, Any] = yaml.safe_load(rendered("kubernetes", *TAUGHT))
    jobs = {job["name"]: job for job in manifest["spec"]["replicatedJobs"]}
    assert list(jobs) == ["head", "policy-0", "policy-1", "rollout", "teacher"]
    assert (jobs["rollout"]["replicas"], jobs["teacher"]["replicas"]) == (6, 2)
    for name, job in jobs.items():
        pod = job["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        names = {variable["name"] for variable in container["env"]}
        assert {"COSMOS_HOST", "REPLICA_INDEX", "HF_HUB_OFFLINE"} <= names
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
        gpus = container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)
        assert gpus == {"head": 0, "rollout": 4, "teacher": 2}.get(name, 8)
        assert (
            subprocess.run(["bash", "-n", "-c", container["command"][2]], check=False).returncode
            == 0
        )
    assert manifest["spec"]["successPolicy"]["targetReplicatedJobs"] == ["head"]


def test_a_cluster_whose_tool_is_not_here_leaves_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = CliRunner().invoke(main, ["run", "recipe.toml", "--launcher", "slurm"])
    assert result.exit_code == 1
    assert "sbatch is not on this machine; runs/big.sbatch is written" in result.output
    assert (folder / "runs" / "big.sbatch").exists()
