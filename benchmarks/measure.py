"""Run a command and account for its whole process tree: wall and CPU seconds, memory, neighbours.

The tree is sampled from outside, so both systems are measured the same way; what other processes
of the machine used meanwhile is reported too, since it is the noise of every number.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil

SAMPLE_S = 1.0
_MIB = 1 << 20


class CommandFailedError(RuntimeError):
    """Raised when a measured command fails or outlives its deadline; names its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What a command used.

    Attributes:
        started_s: wall clock (epoch) at its start.
        wall_s: its duration.
        cpu_s: user and system seconds of every process it had.
        peak_rss_mib: highest sum of resident sets; pages shared between processes count twice.
        peak_pss_mib: highest sum of proportional sets; shared pages count once.
        num_processes: most processes at once.
        others_cpus: CPUs that the rest of the machine kept busy meanwhile, on average.
        cpu_series: (seconds since the start, CPU seconds so far).
    """

    started_s: float
    wall_s: float
    cpu_s: float
    peak_rss_mib: float
    peak_pss_mib: float
    num_processes: int
    others_cpus: float
    cpu_series: tuple[tuple[float, float], ...]


@dataclass(kw_only=True, slots=True)
class TreeSampler:
    """Sums over a process and all its descendants; processes that ended keep their CPU seconds.

    Attributes:
        root: the process at the top.
        cpu_by_process: last seen CPU seconds by (pid, start time).
        peak_rss_mib: highest sum seen.
        peak_pss_mib: highest sum seen.
        num_processes: most processes seen at once.
    """

    root: psutil.Process
    cpu_by_process: dict[tuple[int, float], float] = field(default_factory=dict)
    peak_rss_mib: float = 0.0
    peak_pss_mib: float = 0.0
    num_processes: int = 0

    @property
    def cpu_s(self) -> float:
        """CPU seconds of every process seen so far."""
        return sum(self.cpu_by_process.values())

    def sample(self) -> None:
        """Look at every living process of the tree once."""
        try:
            tree = [self.root, *self.root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        rss = pss = 0.0
        for process in tree:
            try:
                times = process.cpu_times()
                memory = process.memory_full_info()
                key = (process.pid, process.create_time())
            except psutil.Error:
                continue  # it ended while we looked
            self.cpu_by_process[key] = times.user + times.system
            rss += memory.rss / _MIB
            pss += memory.pss / _MIB
        self.peak_rss_mib = max(self.peak_rss_mib, rss)
        self.peak_pss_mib = max(self.peak_pss_mib, pss)
        self.num_processes = max(self.num_processes, len(tree))


def _busy_cpu_s() -> float:
    """CPU seconds that the machine has spent on anything but idling, since it started."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def measure(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    deadline_s: float,
) -> Usage:
    """Run a command to its end in a session of its own, its output in ``log``.

    Raises:
        CommandFailedError: if it exits with another code than 0 or is not done at its deadline.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    busy = _busy_cpu_s()
    started_s, started = time.time(), time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    sampler = TreeSampler(root=psutil.Process(child.pid))
    series: list[tuple[float, float]] = [(0.0, 0.0)]
    try:
        while child.poll() is None:
            sampler.sample()
            seconds = time.monotonic() - started
            series.append((seconds, sampler.cpu_s))
            if seconds > deadline_s:
                raise CommandFailedError(f"{command[0]}: not done in {deadline_s:.0f} s; see {log}")
            time.sleep(SAMPLE_S)
    finally:
        _end_tree(sampler.root)
    wall_s = time.monotonic() - started
    if child.returncode != 0:
        raise CommandFailedError(f"{' '.join(command)}: exit code {child.returncode}; see {log}")
    return Usage(
        started_s=started_s,
        wall_s=wall_s,
        cpu_s=sampler.cpu_s,
        peak_rss_mib=sampler.peak_rss_mib,
        peak_pss_mib=sampler.peak_pss_mib,
        num_processes=sampler.num_processes,
        others_cpus=max(0.0, (_busy_cpu_s() - busy - sampler.cpu_s) / wall_s),
        cpu_series=tuple(series),
    )


def _end_tree(root: psutil.Process) -> None:
    """Ask a tree that still runs to end, then end it; nothing but ``root`` and below is touched."""
    try:
        tree = [root, *root.children(recursive=True)]
        root.send_signal(signal.SIGTERM)
    except psutil.NoSuchProcess:
        return
    _, alive = psutil.wait_procs(tree, timeout=20)
    for process in alive:
        process.kill()


def pids_of(*words: str) -> list[int]:
    """Return the processes with all of these words in their command line or title."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if set(words) <= set(line.replace("\0", " ").split()):
            found.append(int(entry.parent.name))
    return found


def status_mib(field: str) -> float:
    """Return a field of this process's status in MiB: ``VmRSS``, the resident set, or ``VmHWM``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def forget_peak() -> float:
    """Start a new high-water mark of the resident set; return the set's size now, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_mib("VmRSS")


def end_on_sigterm() -> None:
    """Have SIGTERM raise, as Ctrl-C does, so that what is being measured ends with us."""

    def stop(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_IGN)  # a second one must not stop us from tidying up
        raise SystemExit(f"stopped by signal {signum}")

    signal.signal(signal.SIGTERM, stop)


def cpu_at(series: Sequence[tuple[float, float]], seconds: float) -> float:
    """Return the CPU seconds used ``seconds`` after the start, linear between samples."""
    before = series[0]
    for point in series:
        if point[0] >= seconds:
            width = point[0] - before[0]
            share = (seconds - before[0]) / width if width else 1.0
            return before[1] + share * (point[1] - before[1])
        before = point
    return series[-1][1]
