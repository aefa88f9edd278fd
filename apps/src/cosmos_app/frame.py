"""What every run on this machine stands in: directory, Redis, metrics, Ctrl-C, processes.

::

    open_run ─► RunFrame.open: signal handlers ─► Redis ─► sinks ─► (the run) ─► all stopped
"""

import asyncio
import contextlib
import itertools
import json
import signal
import tempfile
import time
import uuid
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape

from cosmos_app.control_files import last_namespace, write_address
from cosmos_app.ended import failure_noted
from cosmos_app.errors import NothingToResumeError
from cosmos_app.full_disk import refusals_told
from cosmos_app.output import json_document, print_json
from cosmos_app.passing_on import passing_metrics_on
from cosmos_app.preloaded import Preloaded
from cosmos_app.recipe import BusConfig, LaunchConfig
from cosmos_app.redis_watch import OwnServer, RedisWatch, hung_after_s, redis_watched
from cosmos_app.shown_recipe import shown_as_json, shown_recipe
from cosmos_app.stop_signals import Presses, leave_terminal, signals_heeded
from cosmos_app.supervisor import Incident, Restarts, Supervisor
from cosmos_app.temporary import own_temporary_directory
from cosmos_core.bus import Bus, BusError, RedisServer
from cosmos_core.metrics import MetricRecord, SinkConfig, SinkContext
from cosmos_core.rundir import (
    NotARunDirectoryError,
    RunDirectory,
    RunInUseError,
    write_atomic,
)

_RUN_MARKER = "run.json"
_KILL_GRACE_S = 5.0


class Loop(Protocol):
    """The training loop of a recipe."""

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        ...


class LaunchedRecipe(Protocol):
    """What is needed of a recipe of whatever kind."""

    @property
    def output(self) -> Path:
        """The run directory."""
        ...

    @property
    def bus(self) -> BusConfig:
        """The control plane."""
        ...

    @property
    def launch(self) -> LaunchConfig:
        """How processes are kept alive."""
        ...

    @property
    def sinks(self) -> tuple[SinkConfig, ...]:
        """Where metrics go."""
        ...

    @property
    def trainer(self) -> Loop:
        """The loop of optimizer steps."""
        ...


def open_run(recipe: LaunchedRecipe, console: Console, *, resume: bool) -> RunDirectory:
    """Lock the run directory: the recipe's, or the next free one beside another run.

    Raises:
        NothingToResumeError: if a run is to go on that is not there.
        RunExistsError: if the directory holds something else.
    """
    if resume:
        if not recipe.output.exists():
            raise NothingToResumeError(f"{recipe.output}: there is no run to resume; drop --resume")
        run = RunDirectory.resume(recipe.output)
        write_atomic(run.config, shown_as_json(recipe))
        return run
    outputs = _outputs(recipe.output)
    while True:
        output = next(outputs)
        text = json.dumps({**shown_recipe(recipe), "output": str(output)}, indent=2) + "\n"
        try:
            run = RunDirectory.create(output, config_json=text, now_s=time.time())
        except RunInUseError:
            continue  # another is being made there right now
        if output != recipe.output:
            said = f"{recipe.output} {_what_is_in(recipe.output)}; this one goes to {output}"
            console.print(said, soft_wrap=True, markup=False)
        return run


def _what_is_in(output: Path) -> str:
    """Say why a new run cannot have a directory that another has."""
    with contextlib.suppress(NotARunDirectoryError):
        if holder := RunDirectory.open(output).holder():
            return f"is in use by {holder}"
    return "holds an earlier run"


def _outputs(output: Path) -> Iterator[Path]:
    """Yield the directories that a new run may have, without end: those without a run."""
    numbered = (output.with_name(f"{output.name}-{number}") for number in itertools.count(2))
    candidates = itertools.chain([output], numbered)
    return (path for path in candidates if not (path / _RUN_MARKER).exists())


@contextlib.contextmanager
def _open_redis(
    recipe: LaunchedRecipe, run: RunDirectory
) -> Generator[tuple[str, OwnServer | None]]:
    """Give the URL of the recipe's server, or of a bundled one that lives as long as the run.

    Waits without giving way, so that no signal comes between a server's start and its keeper.
    """
    if recipe.bus.url is not None:
        yield recipe.bus.url, None
        return
    server = RedisServer.start(run.redis, port=recipe.bus.port, host=recipe.bus.host)
    try:
        own = OwnServer(
            server=server,
            log=run.redis / "redis.log",
            restarts=Restarts(recipe.launch.restarts),
            hung_s=hung_after_s(recipe.bus.lease_s),
        )
        yield server.url, own
    finally:
        server.stop()


def hand_in(
    report: Mapping[str, Any], run: RunDirectory, show: Callable[[], None], *, as_json: bool
) -> None:
    """Keep a run's report in its directory and show it, to a program or to a person."""
    write_atomic(run.report, json_document(report))
    if as_json:
        print_json(report)
    else:
        show()


async def _nothing(_: Incident, /) -> None:
    """Do nothing more about a child's death."""


def _ignore(_: MetricRecord, /) -> None:
    """Do nothing more with a metric."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What a kind of run does about what may happen.

    Attributes:
        stop: asks the processes to end after the step in hand; called once.
        incident: called after a child's death was printed, before it is started again.
        record: called with every metric that was written to the sinks.
    """

    stop: Callable[[], Awaitable[None]]
    incident: Callable[[Incident], Awaitable[None]] = _nothing
    record: Callable[[MetricRecord], None] = _ignore


class RunFrame:
    """One run's surroundings, from its first process to its last.

    Attributes:
        supervisor: of its processes.
    """

    def __init__(
        self,
        recipe: LaunchedRecipe,
        run: RunDirectory,
        console: Console,
        answers: Answers,
        preloaded: Sequence[Preloaded] = (),
    ) -> None:
        """Nothing is started yet; ``preloaded`` fork what they take of the run's processes."""
        self.supervisor = Supervisor(self._on_incident, preloaded)
        self._presses = Presses()
        self._is_open = self._is_killed = False
        self._recipe = recipe
        self._run = run
        self._console = console
        self._answers = answers

    @property
    def stop_reason(self) -> str:
        """Why it was asked to stop before its end; empty if it was not."""
        return self._presses.reason

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncGenerator[Bus]:
        """Give the run's bus; inside, metrics flow to the sinks and Ctrl-C stops the run.

        All children have ended when the block is left, and the server that was started for them.
        """
        namespace = f"cosmos.{self._run.name}.{uuid.uuid4().hex[:8]}"
        with (
            failure_noted(self._run),
            self._interruptible(),
            own_temporary_directory(Path(tempfile.gettempdir())),
            _open_redis(self._recipe, self._run) as (url, own),
        ):
            before = last_namespace(self._run)
            write_address(self._run, url, namespace)
            context = SinkContext(
                run=self._run,
                num_steps=self._recipe.trainer.steps,
                console=self._console,
                config=shown_recipe(self._recipe),
            )
            async with (
                await self._connect(url, namespace) as bus,
                redis_watched(RedisWatch(bus, own, self._say, self._note)),
                passing_metrics_on(
                    bus,
                    self._recipe.sinks,
                    context,
                    self._answers.record,
                    longest_s=self._recipe.launch.sink_s,
                ),
                refusals_told(bus, self._say),
            ):
                if before:  # its launcher may have been killed
                    with contextlib.suppress(BusError):
                        await bus.forget_payloads(before)
                self._is_open = True
                try:
                    yield bus
                finally:
                    self._is_open = False
                    grace_s = self._recipe.launch.stop_grace_s
                    await self.supervisor.stop(
                        min(grace_s, _KILL_GRACE_S) if self._is_killed else grace_s
                    )
                    with contextlib.suppress(BusError):
                        await bus.forget_payloads()

    async def _connect(self, url: str, namespace: str) -> Bus:
        """Return the run's bus, on a server that keeps what it is given.

        Raises:
            ServerSettingsError: if it does not.
        """
        bus = await Bus.connect(url, namespace)
        try:
            for warning in await bus.check_server():
                self._say(f"[yellow]{escape(warning)}[/]")
        except BaseException:
            await bus.close()
            raise
        return bus

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def _note(self, incident: Incident) -> None:
        """Note an end that the supervisor does not see."""
        self.supervisor.incidents.append(incident)
        self._tell(incident)

    def _tell(self, incident: Incident) -> None:
        self._console.print(
            f"[yellow]{incident.name} (pid {incident.pid}) died: {incident.how}; "
            f"{incident.outcome}[/]"
        )

    async def _on_incident(self, incident: Incident) -> None:
        self._tell(incident)
        await self._answers.incident(incident)

    @contextlib.contextmanager
    def _interruptible(self) -> Generator[None]:
        """Have the first Ctrl-C stop the run cleanly and the second one kill it.

        The first one kills a run of which nothing has been started yet, or all has ended.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def interrupt(signum: signal.Signals) -> None:
            if signum == signal.SIGHUP:
                leave_terminal(self._run.logs / "launcher.log")
            if not self._is_open:
                task.cancel()
            elif self._presses.is_first(signum):
                stopping.append(asyncio.ensure_future(self._answers.stop()))
                self._say("[bold]stopping after the step in hand; Ctrl-C again kills[/]")
            elif self._presses.kills(signum):
                self._is_killed = True
                task.cancel()

        stopping: list[asyncio.Future[None]] = []
        heeded = signals_heeded()
        for signum in heeded:
            loop.add_signal_handler(signum, interrupt, signum)
        try:
            yield
        finally:
            for signum in heeded:
                loop.remove_signal_handler(signum)
