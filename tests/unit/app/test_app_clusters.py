"""What a cluster is handed: scripts and manifests as they are, and what scripts really start."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from capabilities import skip_without
from click.testing import CliRunner
from cluster_scripts import rendered, start_script

from cosmos_app.cli import main
from cosmos_app.clusters.placement import place
from cosmos_app.recipe import load_recipe

CONFIGS = Path(__file__).parents[3] / "configs"
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
        ("cluster.directives=['qos=long']", "want one option each, as '--qos=long'"),
    ],
)
def test_what_does_not_fit_is_named(override: str, message: str) -> None:
    arguments = ["run", "recipe.toml", *TAUGHT, override, "--launcher", "slurm", "--dry-run"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def run_script(folder: Path, script: str, **changed: str) -> tuple[int, str]:
    """Run it to its end; return its exit code and its errors."""
    running = start_script(folder, script, **changed)
    _, errors = running.communicate(timeout=240)
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
    for ((i = 0; i < 2000; i++)); do [[ -e stopped ]] && exit 3; sleep 0.1; done;;
  stop) touch stopped;;
esac
"""
_ON_ONE = ("policy.ranks=8", "policy.parallel.dp_shard=8")
_ALONE = ("cluster.setup=:", "policy.replicas=1", *_ON_ONE)


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


# dies so often, then goes on until the run is over, as a replica does
_MORTAL = """
  {role})
    echo >> died; if (($(wc -l < died) <= {deaths})); then exit {code}; fi
    for ((i = 0; i < 2000; i++)); do
      [[ -e stopped || -e runs/big/done ]] && exit 0; sleep 0.1
    done;;
"""
# is over once the file is there, or goes on until it is told to stop
_PATIENT_HEAD = """
echo "cosmos-app $*" >> calls
case "$1" in
  run)
    mkdir -p runs/big; touch runs/big/run.json
    for ((i = 0; i < 2000; i++)); do
      [[ -e stopped ]] && exit 3; {is_over} && {{ touch runs/big/done; exit 0; }}; sleep 0.1
    done;;
  stop) touch stopped;;
"""


def mortal(role: str, *, deaths: int, code: int, is_over: str = "false") -> str:
    """A stand-in of cosmos-app in which a role dies so often with a code."""
    return (
        _PATIENT_HEAD.format(is_over=is_over)
        + _MORTAL.format(role=role, deaths=deaths, code=code)
        + "esac\n"
    )


def test_a_rollout_that_dies_is_started_again_where_it_is(folder: Path) -> None:
    script = rendered("slurm", *_ALONE, "rollout.replicas=1")
    app = mortal("rollout", deaths=1, code=5, is_over="(($(cat died 2> /dev/null | wc -l) == 2))")
    code, errors = run_script(folder, script, **{"cosmos-app": app})
    assert code == 0, errors
    assert "rollout-0 died: exit code 5; it is started again in 0.5 s" in errors
    assert len(heads(folder)) == 1


@pytest.mark.parametrize(("role", "code", "starts"), [("rollout", 5, 2), ("teacher", 2, 1)])
def test_a_job_stops_with_a_checkpoint_when_no_replica_of_a_role_is_left(
    folder: Path, role: str, code: int, starts: int
) -> None:
    """What ended with 2 would refuse again."""
    taught = (*TAUGHT, "teacher.replicas=1") if role == "teacher" else ()
    script = rendered("slurm", *_ALONE, *taught, "rollout.replicas=1", "launch.restarts=1")
    app = mortal(role, deaths=9, code=code)
    found, errors = run_script(folder, script, **{"cosmos-app": app})
    assert found == code, errors
    assert f"no {role} replica is left and one ended with {code}: the run stops" in errors
    assert len((folder / "died").read_text().splitlines()) == starts
    calls = (folder / "calls").read_text()
    assert calls.count("cosmos-app stop runs/big --wait 0") == 1
    assert len(heads(folder)) == 1


def test_a_run_that_was_over_when_its_rollouts_ended_is_no_failure(folder: Path) -> None:
    """The head ends a while after the last of them, and cannot be told to stop any more."""
    script = rendered("slurm", *_ALONE, "rollout.replicas=1", "launch.restarts=0")
    app = mortal("rollout", deaths=9, code=5, is_over="[[ -e asked ]]").replace(
        "touch stopped;;", "touch asked; exit 1;;"
    )
    code, errors = run_script(folder, script, **{"cosmos-app": app})
    assert code == 0, errors


_ELASTIC = ("elastic.lease_s=5", "policy.replicas=2", "launch.restarts=0")


@pytest.mark.parametrize("deaths", [1, 2])
def test_elastic_policies_start_all_again_when_the_last_of_them_is_lost(
    folder: Path, deaths: int
) -> None:
    """One that is left is enough for the run to go on."""
    is_over = "[[ $(cat ended 2> /dev/null | wc -l) == 1 && $SECONDS -ge 4 ]]"
    app = mortal("none", deaths=0, code=0, is_over=f"{is_over} || [[ $* == *--resume* ]]")
    python = f"""
if [[ -e again || "$*" == *policy-{2 - deaths}* && {deaths} == 1 ]]; then
  for ((i = 0; i < 2000; i++)); do [[ -e runs/big/done ]] && exit 0; sleep 0.1; done
fi
echo >> ended; if (($(wc -l < ended) == 2)); then touch again; fi
exit 7
"""
    script = rendered("slurm", *_ALONE, *_ELASTIC)
    code, errors = run_script(folder, script, **{"cosmos-app": app, "python": python})
    assert code == 0, errors
    assert ("ended with 7: all start again" in errors) == (deaths == 2)
    assert [call.endswith("--resume") for call in heads(folder)] == [False, True][:deaths]


def test_an_elastic_policy_that_dies_is_started_again_to_join_the_others(folder: Path) -> None:
    python = 'if [[ "$*" == *policy-0* && ! -e died ]]; then touch died; exit 7; fi; echo >> ended'
    app = mortal("none", deaths=0, code=0, is_over="(($(cat ended 2> /dev/null | wc -l) == 2))")
    script = rendered("slurm", *_ALONE, *_ELASTIC, "launch.restarts=1")
    code, errors = run_script(folder, script, **{"cosmos-app": app, "python": python})
    assert code == 0, errors
    assert "policy-0 died: exit code 7; it is started again in 0.5 s" in errors
    assert len(heads(folder)) == 1


def test_the_signal_before_the_limit_stops_the_run_and_nothing_starts_again(folder: Path) -> None:
    running = start_script(folder, rendered("slurm", *_ALONE), **{"cosmos-app": _WAITING_HEAD})
    for _ in range(2000):
        if (folder / "runs" / "big" / "run.json").exists():
            break
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=240)
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
        (_, final) = job["template"]["spec"]["podFailurePolicy"]["rules"]
        assert final["onExitCodes"]["containerName"] == container["name"]
        assert final["onExitCodes"]["values"] == [2, 3]
    assert manifest["spec"]["successPolicy"]["targetReplicatedJobs"] == ["head"]


def test_pods_with_a_process_that_is_suspended_fail_their_probe(folder: Path) -> None:
    """In a name space of processes of its own, as a container has it."""
    manifest: dict[str, Any] = yaml.safe_load(rendered("kubernetes", *TAUGHT))
    probes = [
        job["template"]["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]
        for job in manifest["spec"]["replicatedJobs"]
    ]
    assert all(probe == probes[0] for probe in probes)
    assert probes[0]["periodSeconds"] * probes[0]["failureThreshold"] == 600
    probe = folder / "probe"
    probe.write_text(shlex.join(probes[0]["exec"]["command"]))
    stopping = """
        sleep 60 & waiting=$!
        look() { sleep 0.3; bash probe && echo lives || echo suspended; }
        look; kill -STOP $waiting; look; kill -CONT $waiting; look; kill $waiting
    """
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "bash", "-c", stopping]
    done = subprocess.run(alone, cwd=folder, capture_output=True, text=True, check=False)
    if "unshare failed" in done.stderr:
        skip_without("namespaces", done.stderr)
    assert done.stdout.split() == ["lives", "suspended", "lives"], done.stderr


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("overrides", "retries"),
    [(_ON_ONE, 0), ((*_ON_ONE, "elastic.lease_s=5"), 4), (("elastic.lease_s=5",), 0)],
)
def test_the_pod_of_an_elastic_policy_on_one_machine_is_replaced(
    overrides: tuple[str, ...], retries: int
) -> None:
    """The ranks of several machines start again together, with all others."""
    text = rendered("kubernetes", "launch.restarts=4", *overrides)
    manifest: dict[str, Any] = yaml.safe_load(text)
    jobs = {job["name"]: job for job in manifest["spec"]["replicatedJobs"]}
    assert jobs["policy-0"]["template"]["spec"]["backoffLimit"] == retries


def test_a_cluster_whose_tool_is_not_here_leaves_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = CliRunner().invoke(main, ["run", "recipe.toml", "--launcher", "slurm"])
    assert result.exit_code == 1
    assert "sbatch is not on this machine; runs/big.sbatch is written" in result.output
    assert (folder / "runs" / "big.sbatch").exists()


@pytest.mark.parametrize("code", [0, 7])
def test_a_jobset_is_written_and_applied_and_the_code_of_kubectl_is_the_commands(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    kubectl = folder / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/given\nexit {code}\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(kubectl.parent), prepend=os.pathsep)
    result = CliRunner().invoke(main, ["run", "recipe.toml", "--launcher", "kubernetes"])
    assert result.exit_code == code, result.output
    assert (folder / "given").read_text().split() == ["apply", "-f", "runs/big.yaml"]
    assert (folder / "runs" / "big.yaml").read_text() == rendered("kubernetes")
    assert ("submitted runs/big.yaml" in result.output) == (code == 0)
    assert not (folder / "runs" / "big").exists(), "the run makes its directory where it starts"


@pytest.mark.parametrize("launcher", ["slurm", "kubernetes"])
@pytest.mark.parametrize("recipe", ["sft", "dpo", "distillation", "reward_model", "wfm/sd3_nft"])
def test_recipes_without_rollout_replicas_are_not_handed_to_a_cluster(
    tmp_path: Path, launcher: str, recipe: str
) -> None:
    output = tmp_path / "run"
    words = ["run", str(CONFIGS / f"{recipe}.toml"), f"output={output}", "--launcher", launcher]
    for flags in ((), ("--dry-run",)):
        result = CliRunner().invoke(main, [*words, *flags])
        assert result.exit_code == 2, result.output
        said = f"--launcher {launcher} runs recipes of kind 'rl'; use torchrun for others"
        assert said in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == []
