"""What a cluster is handed: scripts and manifests as they are, and what scripts really start."""

import os
import subprocess
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


def test_the_script_starts_every_process_with_its_names_and_addresses(folder: Path) -> None:
    """bash really runs it; the cluster's commands are stand-ins that write down what they do."""
    tools = folder / "tools"
    tools.mkdir()
    for name, text in _STAND_INS.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    script = rendered("slurm", "cluster.setup=:", *TAUGHT)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[0-7]"}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
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
