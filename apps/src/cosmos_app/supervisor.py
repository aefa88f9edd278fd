"""Child processes of one run on one machine: started, watched, restarted with back-off, stopped.

Every child has a session and a log file of its own and dies with the launcher. What happened to
each is kept as a list of incidents for the report.
"""

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cosmos_app.errors import REFUSED, ChildFailedError, ChildRefusedError
from cosmos_app.parent import as_parent
from cosmos_app.preloaded import Preloaded, PreloadLostError, Process

Outcome = Literal["restarted", "gave up", "gave up, the others go on"]
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0
_HEALTHY_S = 30.0
_FORGIVEN_S = 3600.0
_LOG_TAIL_LINES = 15
_LOOK_AGAIN_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildSpec:
    """How to start one child.

    Attributes:
        name: replica name; also the name of its log file.
        argv: command line.
        environment: additions to this process's environment.
        log: file that gets its standard output and error.
        restarts: how often it is started again after it died unasked.
        forgiven_s: who has lived for so long has all of them again.
        group: those of one group go on without one that is given up; empty if nobody does.
        needed: as long as so many of the group are left.
    """

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    restarts: int
    group: str = ""
    needed: int = 1
    forgiven_s: float = _FORGIVEN_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """One unexpected end of a child.

    Attributes:
        time_s: wall clock, seconds since the epoch.
        name: which child.
        pid: its process id.
        how: "signal 9 (SIGKILL)" or "exit code 1", with ", as it hung" if it was killed for that.
        outcome: what was done about it.
    """

    time_s: float
    name: str
    pid: int
    how: str
    outcome: Outcome


def describe_exit(returncode: int) -> str:
    """Return how a process ended, in words."""
    if returncode < 0:
        return f"signal {-returncode} ({signal.Signals(-returncode).name})"
    return f"exit code {returncode}"


class Restarts:
    """How often, and how soon, a process that died is started again.

    Attributes:
        left: how often it may yet be.
    """

    def __init__(self, allowed: int, forgiven_s: float = _FORGIVEN_S) -> None:
        """None is used up yet.

        Args:
            allowed: so many in a row, of processes that did not live long.
            forgiven_s: one that lived for so many seconds has all of them again.
        """
        self.left = allowed
        self._allowed = allowed
        self._forgiven_s = forgiven_s
        self._pause_s = 0.0

    def pause_after(self, returncode: int, lived_s: float) -> float | None:
        """Use up a restart; return how long to wait before it, or None if there is none.

        A process that refused what it was asked to would refuse it again. The pause is twice as
        long as the last, but as short as the first if the process had been alive for a while:
        what kills it every hour does not come from starting it too soon.
        """
        if lived_s >= self._forgiven_s:
            self.left = self._allowed
        if returncode == REFUSED or not self.left:
            return None
        self.left -= 1
        if lived_s >= _HEALTHY_S or not self._pause_s:
            self._pause_s = _FIRST_BACKOFF_S
        else:
            self._pause_s = min(2 * self._pause_s, _LONGEST_BACKOFF_S)
        return self._pause_s


def log_tail(path: Path, lines: int = _LOG_TAIL_LINES) -> str:
    """Return the last lines of a log file, or a note that there is none."""
    if not path.exists():
        return f"(no log at {path})"
    text = path.read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])


OnExit = Callable[[Incident], Awaitable[None]]


class Supervisor:
    """Runs children until they finish, are stopped, or one of them cannot be kept alive.

    A child that exits with code 0 has finished and is not started again; nor is one that exits with
    code 2, because its recipe or files are wrong.

    Attributes:
        incidents: every unexpected end so far.
        given_up: children that are not started again while others of their group go on.
    """

    def __init__(self, on_incident: OnExit, preloaded: Sequence[Preloaded] = ()) -> None:
        """Report each unexpected end to ``on_incident`` before anything is done about it.

        Args:
            on_incident: see above.
            preloaded: each forks those children that it takes, as long as it is there.
        """
        self.incidents: list[Incident] = []
        self.given_up: set[str] = set()
        self._on_incident = on_incident
        self._preloaded = preloaded
        self._processes: dict[str, Process] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._groups: dict[str, str] = {}
        self._dismissed: set[str] = set()
        self._recycled: set[str] = set()
        self._hung: set[int] = set()
        self._began_s: dict[str, float] = {}
        self._stopping = False

    def start(self, spec: ChildSpec) -> None:
        """Start and watch a child; returns at once."""
        self._dismissed.discard(spec.name)
        self._groups[spec.name] = spec.group
        self._tasks[spec.name] = asyncio.create_task(self._keep(spec), name=spec.name)

    def pid(self, name: str) -> int | None:
        """Return the process id of a running child."""
        process = self._processes.get(name)
        return process.pid if process and process.returncode is None else None

    def running(self) -> list[str]:
        """Return the names of the children that have not finished, those between starts too."""
        return [name for name, task in self._tasks.items() if not task.done()]

    async def wait(self, names: Sequence[str]) -> None:
        """Return when all of these children have finished.

        Raises:
            ChildFailedError: as soon as any child, named or not, cannot be kept alive.
        """
        waiting = {self._tasks[name] for name in names}
        while waiting:
            for task in self._tasks.values():
                if task.done():
                    task.result()
            waiting = {task for task in waiting if not task.done()}
            running = [task for task in self._tasks.values() if not task.done()]
            if waiting:
                # others may be started meanwhile
                await asyncio.wait(
                    running, timeout=_LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED
                )

    async def wait_briefly(self, names: Sequence[str], longest_s: float) -> None:
        """Return when these children have finished, or after ``longest_s``."""
        tasks = [self._tasks[name] for name in names]
        if tasks:
            await asyncio.wait(tasks, timeout=longest_s)

    def terminate(self, name: str) -> None:
        """Ask one child to end; it is not started again."""
        self._dismissed.add(name)
        pid = self.pid(name)
        if pid is not None:
            signal_session(pid, signal.SIGTERM)

    def recycle(self, name: str) -> bool:
        """Kill a child that has to begin anew with one that died; no incident of its own.

        Returns:
            Whether it was running.
        """
        pid = self.pid(name)
        if pid is None:
            return False
        self._recycled.add(name)
        signal_session(pid, signal.SIGKILL)
        return True

    def end_hung(self, name: str, since_s: float) -> None:
        """Kill a child that hangs; it is started again like one that died.

        Args:
            name: of the child; whoever is not running here is none.
            since_s: since when, in seconds since the epoch; one begun after that is another.
        """
        pid = self.pid(name)
        if pid is not None and self._began_s[name] < since_s:
            self._hung.add(pid)
            signal_session(pid, signal.SIGKILL)

    def give_up(self, name: str) -> None:
        """Kill a child that hangs and is not needed any more; it is not started again."""
        self._dismissed.add(name)
        self.end_hung(name, math.inf)

    def has_begun_before(self, name: str, moment_s: float) -> bool:
        """Whether a child runs, since before a moment in seconds since the epoch."""
        return self.pid(name) is not None and self._began_s[name] < moment_s

    async def stop(self, grace_s: float) -> None:
        """End every child: SIGTERM, then SIGKILL to its whole session after ``grace_s``.

        Who is cancelled meanwhile kills them at once.
        """
        self._stopping = True
        running = [p for p in self._processes.values() if p.returncode is None]
        for process in running:
            signal_session(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        try:
            for process in running:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), max(0.05, deadline - time.monotonic()))
        finally:
            for process in self._processes.values():
                signal_session(process.pid, signal.SIGKILL)
        for process in running:
            await process.wait()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _keep(self, spec: ChildSpec) -> None:
        restarts = Restarts(spec.restarts, spec.forgiven_s)
        while True:
            started = time.monotonic()
            process = await self._spawn(spec)
            if self._is_over(spec.name):
                signal_session(process.pid, signal.SIGTERM)
            returncode = await process.wait()
            signal_session(process.pid, signal.SIGKILL)  # what it may have left behind
            if returncode == 0 or self._is_over(spec.name):
                if returncode and process.pid in self._hung:
                    await self._note(spec, process.pid, returncode, "gave up")
                return
            if spec.name in self._recycled:
                self._recycled.remove(spec.name)
                continue
            pause_s = restarts.pause_after(returncode, time.monotonic() - started)
            await self._note_death(spec, process.pid, returncode, restarts=pause_s is not None)
            if pause_s is None:
                return
            await asyncio.sleep(pause_s)
            if self._is_over(spec.name):
                return

    def _is_over(self, name: str) -> bool:
        """Whether a child is not to be started again, however it ended."""
        return self._stopping or name in self._dismissed

    async def _note_death(
        self, spec: ChildSpec, pid: int, returncode: int, *, restarts: bool
    ) -> None:
        goes_on = not restarts and returncode != REFUSED and self._others_go_on(spec)
        given_up: Outcome = "gave up, the others go on" if goes_on else "gave up"
        if goes_on:
            self.given_up.add(spec.name)
        outcome = "restarted" if restarts else given_up
        incident = await self._note(spec, pid, returncode, outcome)
        if not restarts and not goes_on:
            said = f"the end of {spec.log}:\n{log_tail(spec.log)}"
            if returncode == REFUSED:
                raise ChildRefusedError(f"{spec.name} cannot do what it was asked to; {said}")
            raise ChildFailedError(
                f"{spec.name} died ({incident.how}) and has no restarts left; nothing that was "
                f"saved is lost, and --resume goes on from it; {said}"
            )

    async def _note(self, spec: ChildSpec, pid: int, returncode: int, outcome: Outcome) -> Incident:
        incident = Incident(
            time_s=time.time(),
            name=spec.name,
            pid=pid,
            how=describe_exit(returncode) + (", as it hung" if pid in self._hung else ""),
            outcome=outcome,
        )
        self.incidents.append(incident)
        await self._on_incident(incident)
        return incident

    def _others_go_on(self, spec: ChildSpec) -> bool:
        """Whether enough of a child's group are left without it."""
        left = [
            name
            for name, group in self._groups.items()
            if group == spec.group and name not in {spec.name, *self.given_up}
        ]
        alive = [name for name in left if not self._tasks[name].done()]
        return bool(spec.group) and len(alive) >= spec.needed

    async def _spawn(self, spec: ChildSpec) -> Process:
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **as_parent(), **spec.environment}
        self._began_s[spec.name] = time.time()
        self._processes[spec.name] = process = await self._forked(spec, environment) or (
            await _started(spec, environment)
        )
        return process

    async def _forked(self, spec: ChildSpec, environment: Mapping[str, str]) -> Process | None:
        for preloaded in self._preloaded:
            if preloaded.takes(spec.argv):
                with contextlib.suppress(PreloadLostError):
                    return await preloaded.start(spec.argv, environment, spec.log)
        return None


async def _started(spec: ChildSpec, environment: Mapping[str, str]) -> Process:
    with spec.log.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


def signal_session(pid: int, signum: signal.Signals) -> None:
    """Send a signal to a process that was started in a session of its own, and to all in that."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)
