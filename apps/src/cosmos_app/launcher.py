"""``cosmos-app run``: everything of a run on this machine, from the empty directory to the report.

files ─► redis ─► warm-up ─► controller + policies + rollouts ─► (watch) ─► report
                                  ▲   restarted when they die   │
                                  └─────────────────────────────┘
"""

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from cosmos_app.agreement import Agreement
from cosmos_app.ahead import Ahead
from cosmos_app.bad_steps import BadStepWarning
from cosmos_app.checkpoint_places import open_checkpoints, tell_beginning
from cosmos_app.children import (
    MEETING,
    child_specs,
    controller_names,
    environment,
    policy_names,
    replica_spec,
    teacher_names,
    warmup_spec,
)
from cosmos_app.control_files import (
    forget_meeting_place,
    write_control,
    write_teacher_token,
    write_weights_token,
)
from cosmos_app.dashboard.address import announce_dashboard
from cosmos_app.dashboard.server import check_address
from cosmos_app.devices import needs_of, placement_lines, require_devices, visible_devices
from cosmos_app.ended import require_all_done
from cosmos_app.failing import tell_failures
from cosmos_app.frame import Answers, RunFrame, hand_in, open_run
from cosmos_app.given_server import require_server
from cosmos_app.hung import HungProcesses
from cosmos_app.hung_teachers import HungTeachers
from cosmos_app.late import LatePolicies
from cosmos_app.patience import patience_s
from cosmos_app.preloaded import Preloaded, preloading
from cosmos_app.prepare import (
    RunFiles,
    check_inputs,
    prepare_model,
    run_files,
)
from cosmos_app.prepared_data import count_rows, follow_data, prepare_data
from cosmos_app.recipe import Recipe, controller_config
from cosmos_app.replica_count import await_farewells, keep_replicas
from cosmos_app.replica_modules import shared_by_replicas
from cosmos_app.report import Outcome, RunReport, build_report, print_report
from cosmos_app.report_picture import draw_report
from cosmos_app.rollout_config import require_trainable_engine
from cosmos_app.samples import last_samples
from cosmos_app.standing_still import tell_stillness
from cosmos_app.supervisor import Incident
from cosmos_app.unsaved import UnsavedWarning
from cosmos_core.bus import Bus
from cosmos_core.control import ALL_DONE
from cosmos_core.messages import ReplicaLeft, StopRequested
from cosmos_core.metrics import MetricRecord, read_metrics
from cosmos_core.rundir import RunDirectory

_WARMUP_LINES = 8


async def run_recipe(
    recipe: Recipe, ahead: Ahead | None = None, *, resume: bool, as_json: bool
) -> int:
    """Run a recipe to its end; return the exit code. Imports of its replicas may have begun.

    Raises:
        RunExistsError: if the output directory holds a run and ``resume`` was not asked for.
        NothingToResumeError: if it holds none and it was.
        DataError: if data or model cannot be used, or this machine has too few GPUs.
        BusError: if the recipe's Redis server cannot be used, or its own not have its port.
        DashboardAddressError: if the dashboard cannot have its port.
        ChildFailedError: if a process could not be kept alive.
        RunError: as of `require_all_done`, if it got no further.
        InterruptedRunError: after a clean stop before the last step.
    """
    check_address(recipe.dashboard)
    console = Console(stderr=as_json)
    say = functools.partial(console.print, soft_wrap=True)
    shared = shared_by_replicas(recipe)
    async with preloading(shared, environment(recipe), say, ahead) as preloaded:
        require_trainable_engine(recipe.rollout)
        check_inputs(recipe)
        await require_server(recipe.bus, recipe.output if resume else None)
        if not recipe.launch.external:
            _tell_devices(recipe, console)
        with open_run(recipe, console, resume=resume) as run:
            files = _prepare(recipe, run, console, resume=resume)
            launch = Launch(recipe, run, files, console, is_resumed=resume, preloaded=preloaded)
            report = await launch.run()
            hand_in(report.to_json(), run, lambda: print_report(report, console), as_json=as_json)
            draw_report(report, run.path / "report.png")
    require_all_done(report.finished, report.steps)
    return 0


def _prepare(recipe: Recipe, run: RunDirectory, console: Console, *, resume: bool) -> RunFiles:
    """Lay out the data and the model of a run in its directory."""
    files = run_files(recipe, run.path)
    if resume and files.train.exists():
        follow_data(files)
    else:
        num_train, num_held_out = prepare_data(recipe, files)
        console.print(f"data: {num_train} prompts to train on, {num_held_out} held out")
    parameters = prepare_model(recipe, files)
    if parameters:
        said = f"model: built with {parameters:,} parameters in {files.built_model}"
        console.print(said, soft_wrap=True, markup=False)
    return files


def _tell_devices(recipe: Recipe, console: Console) -> None:
    needs, visible = needs_of(recipe), visible_devices()
    require_devices(needs, len(visible))
    for line in placement_lines(needs, visible):
        console.print(line, soft_wrap=True)


class Launch:
    """One run from its first process to its last.

    The launcher decides nothing about training: it starts and restarts processes, passes metrics
    on to the sinks, and tells the controller who died and that somebody pressed Ctrl-C.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        files: RunFiles,
        console: Console,
        *,
        is_resumed: bool = False,
        preloaded: Sequence[Preloaded] = (),
    ) -> None:
        """Nothing is started yet."""
        self._is_resumed = is_resumed
        self._recipe = recipe
        self._run = run
        self._files = files
        self._console = console
        answers = Answers(stop=self._ask_to_stop, incident=self._on_incident, record=self._look_at)
        say = functools.partial(console.print, soft_wrap=True)
        self._agreement = Agreement(recipe, say)
        self._unsaved = UnsavedWarning(say)
        self._bad_steps = BadStepWarning(say)
        self._frame = RunFrame(recipe, run, console, answers, preloaded)
        self._supervisor = self._frame.supervisor
        self._bus: Bus | None = None

    async def run(self) -> RunReport:
        """Start everything, watch it to its end, report."""
        started = time.monotonic()
        async with self._frame.open() as bus:
            self._bus = bus
            await self._warm_up()
            await self._train(bus)
            status = await bus.read_status()
        return self._report(status, time.monotonic() - started)

    # ---------------------------------------------------------------- the phases

    async def _warm_up(self) -> None:
        if self._files.model.exists() or self._frame.stop_reason:
            return
        spec = warmup_spec(self._recipe, self._run)
        self._supervisor.start(spec)
        await self._supervisor.wait([spec.name])

    async def _train(self, bus: Bus) -> None:
        if self._frame.stop_reason:
            return
        is_external = self._recipe.launch.external
        write_weights_token(self._run)
        if self._recipe.teacher.replicas:
            write_teacher_token(self._run)
        write_control(
            self._run,
            controller_config(self._recipe, count_rows(self._files.held_out)),
            self._cut(),
        )
        forget_meeting_place(self._run)
        say = functools.partial(self._console.print, soft_wrap=True)
        for spec in child_specs(self._recipe, self._run):
            self._supervisor.start(spec)
        beside = self._look_after(bus, say)
        try:
            policies = [] if is_external else policy_names(self._recipe.policy)
            await self._supervisor.wait([*controller_names(self._recipe), *policies])
        finally:
            for task in beside:
                task.cancel()
        for name in teacher_names(self._recipe):
            self._supervisor.terminate(name)  # nobody else tells them that the run is over
        grace_s = self._recipe.launch.stop_grace_s
        leaving = [name for name in self._supervisor.running() if name != MEETING]
        await self._supervisor.wait_briefly(leaving, grace_s)
        if is_external:
            await await_farewells(bus, grace_s)

    def _look_after(self, bus: Bus, say: Callable[[str], None]) -> list[asyncio.Task[None]]:
        """Begin what goes on beside a run that trains, and has to be cancelled at its end."""
        recipe, supervisor = self._recipe, self._supervisor
        hung = HungProcesses(supervisor, patience_s(recipe), say)
        teachers = teacher_names(recipe)
        mute = HungTeachers(self._run, supervisor, teachers, recipe.launch.hung_s, say)
        loops = [announce_dashboard(self._run, say), tell_failures(bus, say)]
        loops += [hung.end(bus), mute.end(), tell_stillness(bus, supervisor.running, say)]
        if not recipe.launch.external:
            late = LatePolicies(
                supervisor,
                policy_names(recipe.policy),
                silence_s=recipe.bus.lease_s + patience_s(recipe),
                start_s=recipe.launch.start_s,
                say=say,
            )
            spec_of = functools.partial(replica_spec, recipe, self._run)
            loops += [late.end(bus), keep_replicas(bus, supervisor, spec_of, say)]
        return [asyncio.create_task(loop) for loop in loops]

    def _cut(self) -> bytes:
        """Return the sample stream of the newest checkpoint; empty for a run without one."""
        trainer = self._recipe.trainer
        store = open_checkpoints(trainer, self._run)
        step = store.latest()
        tell_beginning(step, trainer, self._console, is_resumed=self._is_resumed)
        return b"" if step is None else store.extra(step)

    def _look_at(self, record: MetricRecord) -> None:
        self._agreement.look(record)
        self._unsaved.look(record)
        self._bad_steps.look(record)
        steps = self._recipe.warmup.steps
        if record.role == "warmup" and (record.step + 1) % max(1, steps // _WARMUP_LINES) == 0:
            loss = record.values["loss"]
            self._console.print(f"warm-up step {record.step + 1}/{steps}  loss {loss:.3f}")

    # ---------------------------------------------------------------- what may happen

    async def _on_incident(self, incident: Incident) -> None:
        unheard = [MEETING, *controller_names(self._recipe), *teacher_names(self._recipe)]
        if self._bus is None or incident.name in unheard:
            return
        await self._bus.send_event(ReplicaLeft(replica=incident.name, reason=incident.how))
        is_begun_anew = incident.outcome == "restarted" and self._recipe.elastic is None
        if is_begun_anew and incident.name in policy_names(self._recipe.policy):
            await self._recycle_policies(self._bus, incident.name)

    async def _recycle_policies(self, bus: Bus, dead: str) -> None:
        """Policy replicas sum gradients with one another: all go back to the last checkpoint."""
        for name in policy_names(self._recipe.policy):
            if name != dead and self._supervisor.recycle(name):
                self._console.print(f"{name} starts again from the last checkpoint with {dead}")
                await bus.send_event(ReplicaLeft(replica=name, reason=f"{dead} died"))

    async def _ask_to_stop(self) -> None:
        self._supervisor.terminate("warmup")
        if self._bus is not None:
            await self._bus.send_event(StopRequested(reason=self._frame.stop_reason))

    # ---------------------------------------------------------------- the end

    def _report(self, status: Mapping[str, Any], seconds: float) -> RunReport:
        records = read_metrics(self._run.metrics) if self._run.metrics.exists() else []
        export = self._run.export / "model"
        if status.get("finished") == ALL_DONE and not export.exists():
            self._console.print(
                f"[yellow]the export is missing: 'cosmos-app export {escape(str(self._run.path))} "
                "DESTINATION' writes it from the last checkpoint[/]",
                soft_wrap=True,
            )
        outcome = Outcome(
            run_dir=self._run.path,
            finished=status.get("finished") or self._frame.stop_reason or "nothing was started",
            seconds=seconds,
            accuracies={
                int(version): result["mean_reward"]
                for version, result in status.get("validations", {}).items()
            },
            best_of_several={
                int(version): result["best_reward"]
                for version, result in status.get("validations", {}).items()
                if result.get("num_samples", 1) > 1
            },
            books=status.get("books", {}),
            failures=status.get("counters", {}).get("failures", {}),
            incidents=self._supervisor.incidents,
            samples=last_samples(self._run.path / "samples"),
            export=str(export) if export.exists() else "",
        )
        return build_report(records, outcome)
