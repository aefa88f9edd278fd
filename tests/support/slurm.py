"""A small SLURM on the machines of `machines`: its commands as programs, started from this file.

``srun`` starts the tasks of a step on their machines with the variables that SLURM sets, hands
signals on and ends with the highest exit code; ``scontrol show hostnames`` lists the machines.
Options that are not known here are refused; those about GPUs are dropped.

python slurm.py MACHINES_JSON srun|scontrol ARGUMENTS...
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from machines import Machine, machines

_LOOK_S = 0.05
_KILL_WAIT_S = 30.0  # SLURM's default, from SIGTERM to SIGKILL


@dataclass(kw_only=True)
class Slurm:
    """A cluster of machines.

    Attributes:
        machines: of it; scripts run on the first one.
        folder: of the commands.
        jobs: submitted so far.
    """

    machines: Sequence[Machine]
    folder: Path
    jobs: list[subprocess.Popen[str]] = field(default_factory=list)

    def sbatch(self, script: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a script with an environment and the log that it asks for.

        Raises:
            ValueError: if it asks for more or fewer machines than there are.
        """
        asked = _directives(script)
        if int(asked["nodes"]) != len(self.machines):
            raise ValueError(f"{script} asks for {asked['nodes']} of {len(self.machines)} machines")
        number = str(len(self.jobs) + 1)
        of_itself = {"PROCID": "0", "NODEID": "0", "LOCALID": "0", "NTASKS": "1"}
        given = {
            **environment,
            "PATH": f"{self.folder}:{environment['PATH']}",
            "SLURM_JOB_ID": number,
            "SLURM_JOB_NODELIST": _node_list(self.machines),
            **{f"SLURM_{name}": value for name, value in of_itself.items()},
        }
        with Path(asked["output"].replace("%j", number)).open("wb") as log:
            job = subprocess.Popen(
                self.machines[0].command("bash", str(script)),
                cwd=script.parent,
                env=given,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.jobs.append(job)
        return job


@contextlib.contextmanager
def slurm(count: int, folder: Path, network: str) -> Generator[Slurm]:
    """Make a cluster of so many machines, whose commands are written into a new directory.

    Args:
        count: how many.
        folder: for the commands.
        network: beginning of the machines' addresses.
    """
    folder.mkdir()
    known = folder / "machines.json"
    with machines(count, network=network) as made:
        known.write_text(json.dumps([asdict(machine) for machine in made]))
        for name in _COMMANDS:
            words = [sys.executable, "-E", str(Path(__file__).resolve()), str(known), name]
            (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            (folder / name).chmod(0o755)
        cluster = Slurm(machines=made, folder=folder)
        try:
            yield cluster
        finally:
            for job in cluster.jobs:
                job.kill()
                job.wait(timeout=_KILL_WAIT_S)


def _node_list(made: Sequence[Machine]) -> str:
    return f"node[0-{len(made) - 1}]"


def _directives(script: Path) -> dict[str, str]:
    beginning = "#SBATCH --"
    lines = [line for line in script.read_text().splitlines() if line.startswith(beginning)]
    return dict(line.removeprefix(beginning).split("=", 1) for line in lines)


def _scontrol(made: Sequence[Machine], words: Sequence[str]) -> int:
    if list(words) != ["show", "hostnames", _node_list(made)]:
        sys.exit(f"scontrol: asked for {' '.join(words)}")
    sys.stdout.writelines(f"{machine.name}\n" for machine in made)
    return 0


def _srun(made: Sequence[Machine], words: Sequence[str]) -> int:
    asked = _asked(words)
    machines = {machine.name: machine for machine in made}
    names = asked.nodelist.split(",")
    if len(names) != asked.nodes or asked.ntasks > asked.nodes * asked.ntasks_per_node:
        sys.exit(f"srun: {asked.ntasks} tasks do not fit {asked.nodelist}")
    tasks = [
        _start(machines[names[index // asked.ntasks_per_node]], index, asked)
        for index in range(asked.ntasks)
    ]
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _: _signal(tasks, signum))
    return _wait(tasks, is_ended_by_one=bool(asked.kill_on_bad_exit))


def _asked(words: Sequence[str]) -> argparse.Namespace:
    options = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
    options.add_argument("--overlap", action="store_true", required=True)
    for name, default in (("nodes", None), ("ntasks", None), ("ntasks-per-node", 1)):
        options.add_argument(f"--{name}", type=int, default=default, required=default is None)
    options.add_argument("--nodelist", required=True)
    options.add_argument("--kill-on-bad-exit", type=int, default=0)
    for name in ("gpus", "gpus-per-task"):
        options.add_argument(f"--{name}", type=int)
    options.add_argument("command", nargs=argparse.REMAINDER)
    return options.parse_args(words)


def _start(machine: Machine, index: int, asked: argparse.Namespace) -> subprocess.Popen[bytes]:
    place = {
        "PROCID": index,
        "NODEID": index // asked.ntasks_per_node,
        "LOCALID": index % asked.ntasks_per_node,
        "NTASKS": asked.ntasks,
    }
    variables = {f"SLURM_{name}": str(value) for name, value in place.items()}
    return subprocess.Popen(
        machine.command(*asked.command), env={**os.environ, **variables}, start_new_session=True
    )


def _wait(tasks: Sequence[subprocess.Popen[bytes]], *, is_ended_by_one: bool) -> int:
    killed_s = float("inf")
    while any(task.poll() is None for task in tasks):
        time.sleep(_LOOK_S)
        if is_ended_by_one and any(task.returncode for task in tasks):
            _signal(tasks, signal.SIGTERM)
            killed_s = min(killed_s, time.monotonic() + _KILL_WAIT_S)
            is_ended_by_one = False
        if time.monotonic() > killed_s:
            _signal(tasks, signal.SIGKILL)
    codes = [task.returncode for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


def _signal(tasks: Sequence[subprocess.Popen[bytes]], signum: int) -> None:
    for task in tasks:
        if task.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(task.pid, signum)


_COMMANDS = {"srun": _srun, "scontrol": _scontrol}

if __name__ == "__main__":
    _made = [Machine(**fields) for fields in json.loads(Path(sys.argv[1]).read_text())]
    sys.exit(_COMMANDS[sys.argv[2]](_made, sys.argv[3:]))
