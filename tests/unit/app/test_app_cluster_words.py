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


def test_words_of_a_person_reach_the_processes_of_a_job_set_whole(folder: Path) -> None:
    tools, marker = folder / "tools", folder / "runs" / "my 100% run" / "run.json"
    for path in (tools, marker.parent):
        path.mkdir(parents=True)
    (tools / "cosmos-app").write_text(f"#!/bin/bash\n{_LISTING}")
    (tools / "cosmos-app").chmod(0o755)
    marker.touch()
    manifest = yaml.safe_load(rendered("kubernetes", *_ODD_WORDS))
    for job in manifest["spec"]["replicatedJobs"]:
        if job["name"] in {"head", "rollout"}:
            pod = job["template"]["spec"]["template"]["spec"]
            given = {"PATH": f"{tools}:{os.environ['PATH']}", "COSMOS_HOST": "1.2.3.4"}
            environment = {**given, "REPLICA_INDEX": "5"}
            command = [expanded(word, environment) for word in pod["containers"][0]["command"]]
            subprocess.run(command, cwd=folder, env=environment, check=True)
    assert (folder / "said").read_text().splitlines() == [
        *("run", "recipe.toml", *_ODD_WORDS, "launch.external=true", "bus.host=1.2.3.4"),
        *("dashboard.token_file=/etc/cosmos/token", "--resume"),
        *("rollout", "runs/my 100% run", "--replica", "rollout-5", "--wait", "1800"),
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
