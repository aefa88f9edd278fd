"""A small SLURM on the machines of `machines`: its own daemons, one `slurmd` in each.

Machines claim 16 cores, and graphics processors whose device files are as good as /dev/null: SLURM
counts and hands out what it is told of, and hides devices by a variable alone.
"""

import contextlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from capabilities import skip_without
from machines import IPV6, Machine, machines
from machines import why_not as why_no_machines

_DAEMONS = ("slurmctld", "slurmd")
_COMMANDS = ("sbatch", "scancel", "scontrol", "sinfo", "srun")
_DEADLINE_S = 60.0
_LOOK_S = 0.1
_NUM_CORES = 16
_NUM_GPUS = 8
_LIKE_NULL = os.makedev(1, 3)
# ends with the exit code of the job that it is told of, as `sbatch --wait` does
_UNTIL_OVER = """
while said=$(scontrol --oneliner show job "$1") &&
      ! grep -Eq "JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)" <<< "$said"; do
  sleep 0.4
done
[[ "$said" =~ ExitCode=([0-9]+):([0-9]+) ]] || exit 255
exit $((BASH_REMATCH[1] + BASH_REMATCH[2]))
"""
_CONFIGURATION = """\
ClusterName=cosmos
SlurmctldHost={head.name}({head.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={spool}/%n
JobRequeue=0
SlurmdParameters=config_overrides
{addresses}
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(kw_only=True)
class Slurm:
    """A cluster of machines.

    Attributes:
        machines: of it; the first one has the controller, and scripts run on it.
        folder: of its configuration, state and logs.
        spool: where machines keep what they run; its path is short, as they make sockets in it.
        daemons: one controller, and one for each machine.
        submitted: who waits for jobs.
    """

    machines: Sequence[Machine]
    folder: Path
    spool: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)
    submitted: list[subprocess.Popen[str]] = field(default_factory=list)

    def sbatch(self, script: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Submit a script with an environment; who waits for it ends with the job's exit code."""
        return self.submitted_by(["sbatch", str(script)], script.parent, environment)[0]

    def submitted_by(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> tuple[subprocess.Popen[str], str]:
        """Have a command submit a job; return who waits for it, as `sbatch` does, and its words."""
        done = subprocess.run(
            self.machines[0].command(*command),
            cwd=folder,
            env={**environment, **self._known},
            capture_output=True,
            text=True,
            timeout=2 * _DEADLINE_S,
            check=False,
        )
        found = re.search(r"^Submitted batch job (\d+)$", done.stdout, re.MULTILINE)
        if done.returncode or not found:
            raise subprocess.SubprocessError(f"{done.returncode}: {done.stdout}{done.stderr}")
        waiting = subprocess.Popen(
            self.machines[0].command("bash", "-c", _UNTIL_OVER, "bash", found[1]),
            env={**os.environ, **self._known},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.submitted.append(waiting)
        return waiting, done.stdout

    def start(self) -> None:
        """Start the daemons and wait until each machine is ready for jobs."""
        head = self.machines[0]
        self._daemon(head, "slurmctld", "-D")
        for machine in self.machines:
            (self.spool / machine.name).mkdir()
            self._daemon(machine, "slurmd", "-D", "-N", machine.name)
        wanted = f"idle {len(self.machines)}"
        deadline = time.monotonic() + _DEADLINE_S
        while (said := self.ask("sinfo", "--noheader", "--format=%T %D")) != wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"SLURM has {said} after {_DEADLINE_S:g} s:\n{self._logs()}")
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        """End jobs and daemons."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.ask("scancel", "--full", "--signal=KILL", "--user=root")
        for waiting in self.submitted:
            waiting.kill()
            waiting.communicate(timeout=_DEADLINE_S)
        for daemon in self.daemons:
            daemon.kill()
            daemon.wait(timeout=_DEADLINE_S)

    def ask(self, *command: str) -> str:
        """Return what a command of SLURM's says, on the first machine."""
        done = subprocess.run(
            self.machines[0].command(*command),
            env={**os.environ, **self._known},
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
        return done.stdout.strip() or done.stderr.strip()

    @property
    def _known(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def _daemon(self, machine: Machine, *command: str) -> None:
        with (self.folder / f"{command[0]}-{machine.name}.log").open("wb") as log:
            started = subprocess.Popen(
                machine.command(*command),
                env={**os.environ, **self._known},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.daemons.append(started)

    def _logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.folder.glob("*.log"))
        )


def skip_without_cluster() -> None:
    """Skip the test where no cluster can be had."""
    if missing := [tool for tool in (*_DAEMONS, *_COMMANDS) if shutil.which(tool) is None]:
        skip_without("slurm", f"no {', '.join(missing)}")
    if reason := why_no_machines():
        skip_without("machines", reason)


@contextlib.contextmanager
def slurm(count: int, folder: Path, network: str) -> Generator[Slurm]:
    """Make a cluster of so many machines, which keeps its files in a new directory.

    Args:
        count: how many.
        folder: of its files.
        network: beginning of the machines' addresses.
    """
    (folder / "state").mkdir(parents=True)
    with (
        tempfile.TemporaryDirectory(
            prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True
        ) as spool,
        machines(count, network=network) as made,
    ):
        cluster = Slurm(machines=made, folder=folder, spool=Path(spool))
        _configure(cluster, network)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def _configure(cluster: Slurm, network: str) -> None:
    folder, made = cluster.folder, cluster.machines
    each = (
        f"SocketsPerBoard=1 CoresPerSocket={_NUM_CORES} ThreadsPerCore=1 RealMemory=16000 "
        f"Gres=gpu:{_NUM_GPUS}"
    )
    text = _CONFIGURATION.format(
        head=made[0],
        folder=folder,
        spool=cluster.spool,
        addresses="CommunicationParameters=EnableIPv6,DisableIPv4" if network == IPV6 else "",
        nodes="\n".join(f"NodeName={m.name} NodeAddr={m.address} {each}" for m in made),
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n")
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{_NUM_GPUS - 1}]\n")
    for index in range(_NUM_GPUS):
        os.mknod(folder / f"gpu{index}", stat.S_IFCHR | 0o666, _LIKE_NULL)
