"""Paths and overrides with spaces, quotes and dollars, in what a cluster is handed."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from cluster_scripts import rendered, start_script

from cosmos_app.cli import main

_ODD_WORDS = (
    "output=runs/my 100% run",
    "reward.rewards=[{kind='length', target=0, limit=32}]",
    "data.path=sums for $HOME.jsonl",
    "model.path=$$, $$$(HOME) and $(COSMOS_HOST)",
)
# each word on a line of its own
_UNTIL_STOPPED = "for ((i = 0; i < 200; i++)); do [[ -e stopped ]] && exit 0; sleep 0.1; done"
_LISTING = 'printf "%s\\n" "$@" >> said; echo "cosmos-app $*" >> calls\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipe.toml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_words_of_a_person_reach_the_processes_of_a_script_whole(folder: Path) -> None:
    script = rendered("slurm", *_ODD_WORDS, "rollout.replicas=1")
    assert "\n#SBATCH --output='runs/my 100%% run.slurm-%j.log'\n" in script
    app = (
        _LISTING
        + """
case "$1" in
  run) for ((i = 0; i < 2000; i++)); do [[ -e stopped ]] && exit 3; sleep 0.1; done;;
  stop) touch stopped;;
esac
"""
    )
    running = start_script(folder, script, **{"cosmos-app": app, "python": _UNTIL_STOPPED})
    for _ in range(2000):
        if "cosmos-app run" in _text_of(folder / "calls"):
            break
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=240)
    assert running.returncode == 3, errors
    said = (folder / "said").read_text()
    assert "\n".join(("", *_ODD_WORDS, "")) in said
    assert "stop\nruns/my 100% run\n--wait\n0\n" in said


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def expanded(word: str, environment: dict[str, str]) -> str:
    """Do what a kubelet does to a command (kubernetes.io/docs, dependent environment variables)."""
    made = ""
    while word:
        named = re.match(r"\$\((.*?)\)", word)
        if word.startswith("$$"):
            made, word = f"{made}$", word[2:]
        elif named:
            made += environment.get(named[1], named[0])
            word = word[named.end() :]
        else:
            made, word = made + word[0], word[1:]
    return made


def pods_run(folder: Path, *overrides: str) -> dict[str, list[list[str]]]:
    """Have bash really run what each pod of a job set would; return the words of who it starts.

    By the job's name, of each of its pods; of a job that comes several times the sixth.
    """
    tools, marker = folder / "tools", folder / "runs" / "my 100% run" / "run.json"
    for path in (tools, marker.parent):
        path.mkdir(parents=True)
    for name in ("cosmos-app", "python"):
        (tools / name).write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@" > said\n')
        (tools / name).chmod(0o755)
    marker.touch()
    started: dict[str, list[list[str]]] = {}
    for job in yaml.safe_load(rendered("kubernetes", *overrides))["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        command = spec["template"]["spec"]["containers"][0]["command"]
        for pod in range(spec["completions"]):
            environment = {
                "PATH": f"{tools}:{os.environ['PATH']}",
                "COSMOS_HOST": "1.2.3.4",
                "REPLICA_INDEX": "5",
                "JOB_COMPLETION_INDEX": str(pod),  # as it is in each pod of an indexed Job
            }
            words = [expanded(word, environment) for word in command]
            subprocess.run(words, cwd=folder, env=environment, check=True)
            said = (folder / "said").read_text().splitlines()
            started.setdefault(job["name"], []).append(said)
    return started


def test_words_of_a_person_reach_the_processes_of_a_job_set_whole(folder: Path) -> None:
    started = pods_run(folder, *_ODD_WORDS)
    assert started.keys() == {"head", "policy-0", "rollout"}
    assert started["head"] == [
        [
            *("cosmos-app", "run", "recipe.toml", *_ODD_WORDS),
            *("launch.external=true", "bus.host=1.2.3.4"),
            *("dashboard.token_file=/etc/cosmos/token", "--resume"),
        ]
    ]
    assert started["rollout"] == [
        ["cosmos-app", "rollout", "runs/my 100% run", "--replica", "rollout-5", "--wait", "1800"]
    ]


def test_ranks_of_a_job_set_meet_at_the_first_pod_of_their_replica(folder: Path) -> None:
    """What pods start is held against torchrun's own reading of its words."""
    pytest.importorskip("torch")
    from torch.distributed.run import parse_args

    divided = ("policy.replicas=2", "policy.ranks=16", "policy.parallel.dp_shard=16")
    started = pods_run(folder, *_ODD_WORDS, *divided)
    name = yaml.safe_load(rendered("kubernetes", *_ODD_WORDS))["metadata"]["name"]
    for replica in (0, 1):
        pods = started[f"policy-{replica}"]
        assert len(pods) == 2
        for rank, (program, option, module, *words) in enumerate(pods):
            assert (program, option, module) == ("python", "-m", "cosmos_app.torchrun")
            read = parse_args(words)
            assert (read.nnodes, read.node_rank, read.nproc_per_node) == ("2", rank, "8")
            # JobSet: NAME-JOB-INDEX-POD of the subdomain, which is the set's name
            assert read.master_addr == f"{name}-policy-{replica}-0-0.{name}"
            assert read.master_port == 29500 + replica
            assert (read.module, read.training_script) == (True, "cosmos_app")
            assert read.training_script_args == [
                *("policy", "runs/my 100% run", "--replica", f"policy-{replica}"),
                *("--wait", "1800"),
            ]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("value", ["redis://:s3cret@redis:1/0", "'redis://:s3cret@redis:1/0'"])
def test_a_password_is_not_put_into_a_manifest(value: str) -> None:
    arguments = ["run", "recipe.toml", f"bus.url={value}", "--launcher", "slurm", "--dry-run"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "bus.url holds a password" in result.output
    assert "s3cret" not in result.output
    Path("recipe.toml").write_text("bus.url = 'redis://:s3cret@redis:1/0'")
    assert "s3cret" not in rendered("slurm")
