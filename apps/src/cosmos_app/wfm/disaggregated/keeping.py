"""Replicas that a run starts on its own host, and starts again when they die or hang."""

import asyncio
import functools
import math
import queue
import signal
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Self

import click

from cosmos_app.errors import RunError
from cosmos_app.preloaded import Shared, preloading
from cosmos_app.supervisor import ChildSpec, Incident, Supervisor, signal_session
from cosmos_app.wfm.disaggregated.pulse import StartedReplica

_END_S = 5.0
_GRACE_S = 5.0
_LOOK_S = 0.1


def replica_specs(
    output: Path, num: int, restarts: int, *, first_device: int = 0
) -> list[ChildSpec]:
    """Return how the replicas of a run are started; each has a log in the run's directory.

    Args:
        output: of the run.
        num: how many.
        restarts: how often each is started again.
        first_device: of the first replica; the others have the next ones, and where there are no
            more, the first again.
    """
    command = (sys.executable, "-m", "cosmos_app", "wfm", "rollout", str(output), "--child")
    return [
        ChildSpec(
            name=f"replica{index}",
            argv=(*command, f"replica{index}"),
            environment={
                "RANK": "0",
                "WORLD_SIZE": "1",
                "LOCAL_RANK": str(first_device + index),
                "PYTHONUNBUFFERED": "1",
            },
            log=output / "disaggregated" / f"replica{index}.log",
            restarts=restarts,
        )
        for index in range(num)
    ]


class KeptReplicas:
    """Keeps processes alive in a thread of its own; leaving the block ends them.

    Attributes:
        loss: why one of them cannot be kept alive, once that is so.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        stall_s: float = math.inf,
        *,
        modules: Sequence[str] = (),
    ) -> None:
        """Get ready; nothing is started before the block.

        Args:
            specs: how they are started.
            stall_s: a process that was not heard of for as long since it began, and since there
                was somebody to connect to, is killed.
            modules: what they import: they are forked from a process that has. Without, each is
                started by itself.
        """
        self.loss: Future[RunError] = Future()
        self._specs = specs
        self._modules = modules
        self._stall_s = stall_s
        self._opened = threading.Event()
        self._heard: set[StartedReplica] = set()
        self._looks: Counter[StartedReplica] = Counter()
        self._hung: queue.SimpleQueue[StartedReplica] = queue.SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._keep()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until all have ended; those that do not by themselves are killed."""
        self._over.set()
        self._thread.join(2 * (_END_S + _GRACE_S))

    def kill(self, replica: StartedReplica) -> None:
        """Kill one that hangs, which is then as one that died; from any thread.

        Nothing is done about a process that has ended.
        """
        self._hung.put(replica)

    def open(self) -> None:
        """Note that replicas can connect from now on; from any thread."""
        self._opened.set()

    def hear(self, replica: StartedReplica) -> None:
        """Note that one has connected; from any thread, as often as it speaks."""
        self._heard.add(replica)

    async def _keep(self) -> None:
        say = functools.partial(click.echo, err=True)
        async with preloading([Shared(modules=self._modules)], {}, say) as preloaded:
            await self._keep_alive(Supervisor(_tell, preloaded))

    async def _keep_alive(self, supervisor: Supervisor) -> None:
        names = [spec.name for spec in self._specs]
        for spec in self._specs:
            supervisor.start(spec)
        kept = asyncio.create_task(supervisor.wait(names))
        while not (kept.done() or self._over.is_set()):  # no thread waits: it might outlive us
            await asyncio.wait({kept}, timeout=_LOOK_S)
            self._look_for_mute(supervisor)
            while not self._hung.empty():
                hung = self._hung.get_nowait()
                if supervisor.pid(hung.name) == hung.pid:
                    signal_session(hung.pid, signal.SIGKILL)
        if kept.done() and isinstance(error := kept.exception(), RunError):
            self.loss.set_result(error)
        kept.cancel()
        await supervisor.wait_briefly(names, _END_S)
        await supervisor.stop(_GRACE_S)

    def _look_for_mute(self, supervisor: Supervisor) -> None:
        """Kill who has not connected for too long; looks are counted, as this process may stop."""
        if not self._opened.is_set():
            return
        for name in supervisor.running():
            replica = StartedReplica(name, supervisor.pid(name) or 0)
            if not replica.pid or replica in self._heard:
                continue
            self._looks[replica] += 1
            if self._looks[replica] * _LOOK_S > self._stall_s:
                del self._looks[replica]
                click.echo(
                    f"rollout {name} (process {replica.pid}) did not connect in "
                    f"{self._stall_s:g} s; it is killed",
                    err=True,
                )
                signal_session(replica.pid, signal.SIGKILL)


async def _tell(incident: Incident) -> None:
    said = f"rollout {incident.name} (process {incident.pid}) ended: {incident.how}"
    click.echo(f"{said}; {incident.outcome}", err=True)
