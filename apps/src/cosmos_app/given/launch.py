"""``cosmos-app run`` of a recipe with given data, from the empty directory to the report.

files ─► redis (metrics) ─► meeting place + replicas ─► (watch) ─► report
                              ▲  restarted when they die; the others go on without them
"""

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console

from cosmos_app.ahead import Ahead
from cosmos_app.bad_steps import BadStepWarning
from cosmos_app.checkpoint_places import open_checkpoints, tell_beginning
from cosmos_app.children import (
    MEETING,
    meeting_command,
    policy_commands,
    policy_names,
    specs_of,
    training_environment,
)
from cosmos_app.control_files import forget_meeting_place
from cosmos_app.devices import needs_of_policies, require_devices, visible_devices
from cosmos_app.errors import InterruptedRunError
from cosmos_app.frame import Answers, RunFrame, hand_in, open_run
from cosmos_app.given.data_config import num_kept_back
from cosmos_app.given.encoded import encode_data
from cosmos_app.given.files import check_inputs, prepare_model
from cosmos_app.given.modules import learners
from cosmos_app.given.recipe import GivenRecipe
from cosmos_app.given.stop_file import ask_to_stop, forget_stop
from cosmos_app.given_server import require_server
from cosmos_app.output import from_to, print_facts
from cosmos_app.preloaded import Preloaded, preloading
from cosmos_app.report import median
from cosmos_app.supervisor import ChildSpec, Incident
from cosmos_app.suspended import SuspendedProcesses
from cosmos_app.unsaved import UnsavedWarning
from cosmos_core.metrics import MetricRecord, of_data_sets, read_metrics
from cosmos_core.rundir import RunDirectory

_VALIDATION = "validation"


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenReport:
    """What a run did.

    Attributes:
        run_dir: where it all lies.
        finished: whether the last step, or a later one, was taken.
        examples: to train on.
        left_out: rows that are longer than ``data.rows.max_tokens``.
        seconds: wall time.
        steps: optimizer steps taken, those of earlier launches counted.
        losses: training loss by step.
        validation_losses: loss over the examples kept back, by step.
        data_sets: the same of each data set that has a name, each by step.
        tokens_per_second: median over steps.
        incidents: processes that died unasked, and what was done.
        export: the Hugging Face model, if one was written.
    """

    run_dir: str
    finished: bool
    examples: int
    left_out: int
    seconds: float
    steps: int
    losses: dict[int, float]
    validation_losses: dict[int, float]
    data_sets: dict[str, dict[int, float]]
    tokens_per_second: float
    incidents: tuple[Incident, ...]
    export: str


async def run_given_recipe(
    recipe: GivenRecipe, ahead: Ahead | None = None, *, resume: bool, as_json: bool
) -> int:
    """Run a recipe with given data to its end; return the exit code. Imports may have begun.

    Raises:
        RunExistsError: if the output directory holds a run and ``resume`` was not asked for.
        NothingToResumeError: if it holds none and it was.
        DataError: if the model cannot be used, or this machine has too few GPUs.
        ParallelError: if the data cannot be used, or the model not be divided as the recipe says.
        BusError: if the recipe's Redis server cannot be used, or its own not have its port.
        ChildFailedError: if a process could not be kept alive.
        InterruptedRunError: after a clean stop before the last step.
    """
    console = Console(stderr=as_json)
    surroundings = training_environment(recipe.policy)
    say = functools.partial(console.print, soft_wrap=True)
    async with preloading([learners(recipe)], surroundings, say, ahead) as preloaded:
        num_rows = check_inputs(recipe)
        await require_server(recipe.bus, recipe.output if resume else None)
        require_devices(needs_of_policies(recipe.policy), len(visible_devices()))
        with open_run(recipe, console, resume=resume) as run:
            parameters = prepare_model(recipe, run)
            if parameters:
                where = run.path / "model"
                said = f"model: built with {parameters:,} parameters in {where}"
                console.print(said, soft_wrap=True, markup=False)
            await encode_data(recipe, run, console)
            newest = open_checkpoints(recipe.trainer, run).latest()
            tell_beginning(newest, recipe.trainer, console, is_resumed=resume)
            report = await GivenLaunch(recipe, run, console, num_rows, preloaded).run()
            hand_in(asdict(report), run, lambda: print_report(report, console), as_json=as_json)
    if not report.finished:
        raise InterruptedRunError(f"stopped at step {report.steps}; go on with --resume")
    return 0


class GivenLaunch:
    """One run from its first process to its last."""

    def __init__(
        self,
        recipe: GivenRecipe,
        run: RunDirectory,
        console: Console,
        num_rows: int,
        preloaded: Sequence[Preloaded] = (),
    ) -> None:
        """Nothing is started yet; ``num_rows`` is what the data of the recipe has."""
        self._recipe = recipe
        self._run = run
        self._console = console
        self._num_rows = num_rows
        self._has_told = False
        self._say = functools.partial(console.print, soft_wrap=True)
        self._unsaved = UnsavedWarning(self._say)
        self._bad_steps = BadStepWarning(self._say)
        answers = Answers(stop=self._ask_to_stop, record=self._look_at)
        self._frame = RunFrame(recipe, run, console, answers, preloaded)

    async def run(self) -> GivenReport:
        """Start everything, watch it to its end, report."""
        started = time.monotonic()
        forget_meeting_place(self._run)
        forget_stop(self._run)
        supervisor = self._frame.supervisor
        async with self._frame.open():
            for spec in child_specs(self._recipe, self._run):
                supervisor.start(spec)
            hung_s = self._recipe.launch.hung_s
            suspended = asyncio.create_task(SuspendedProcesses(supervisor, hung_s, self._say).end())
            try:
                await supervisor.wait(policy_names(self._recipe.policy))
            finally:
                suspended.cancel()
        return self._report(time.monotonic() - started)

    async def _ask_to_stop(self) -> None:
        ask_to_stop(self._run)

    def _look_at(self, record: MetricRecord) -> None:
        self._unsaved.look(record)
        self._bad_steps.look(record)
        self._tell_left_out(record)

    def _tell_left_out(self, record: MetricRecord) -> None:
        """Say once, as soon as it is known, how many examples are not trained on."""
        if self._has_told or "examples" not in record.values:
            return
        self._has_told = True
        if left_out := self._left_out(record):
            data = self._recipe.data
            total = left_out + num_kept_back(data) + int(record.values["examples"])
            self._console.print(
                f"[yellow]{left_out:,} of {total:,} examples are longer than "
                f"data.rows.max_tokens={data.rows.max_tokens} and left out[/]"
            )

    def _left_out(self, record: MetricRecord) -> int:
        """Return how many examples a record says nothing is learned from; held-out ones apart.

        Of supervised ones it says it, as a row may be several; of preferences each is a row.
        """
        kept_back = num_kept_back(self._recipe.data)
        rows = self._num_rows - kept_back - int(record.values["examples"])
        return int(record.values.get("left_out", rows))

    def _report(self, seconds: float) -> GivenReport:
        records = read_metrics(self._run.metrics) if self._run.metrics.exists() else []
        export = self._run.export / "model"
        steps = max((record.step + 1 for record in records), default=0)
        last = next((one for one in reversed(records) if "examples" in one.values), None)
        return GivenReport(
            run_dir=str(self._run.path),
            finished=steps >= self._recipe.trainer.steps and export.exists(),
            examples=int(last.values["examples"]) if last else 0,
            left_out=self._left_out(last) if last else 0,
            seconds=seconds,
            steps=steps,
            losses=_series(records, "loss"),
            validation_losses=_series(records, "validation_loss"),
            data_sets=_data_sets(records),
            tokens_per_second=median(list(_series(records, "tokens_per_second").values()) or [0.0]),
            incidents=tuple(self._frame.supervisor.incidents),
            export=str(export) if export.exists() else "",
        )


def child_specs(recipe: GivenRecipe, run: RunDirectory) -> list[ChildSpec]:
    """Return the replicas of a run, and where they meet if there are several."""
    several = recipe.policy.replicas > 1
    commands = {
        **({MEETING: meeting_command(run)} if several else {}),
        **policy_commands("learner", recipe.policy, run),
    }
    return specs_of(
        commands,
        run,
        recipe.launch,
        training_environment(recipe.policy),
        needs_of_policies(recipe.policy),
    )


def print_report(report: GivenReport, console: Console) -> None:
    """Show a report to a person."""
    facts = [
        ("steps", str(report.steps)),
        *(("examples", text) for text in _examples_text(report)),
        ("loss", from_to(report.losses)),
        *(("validation loss", text) for text in _validation_text(report.validation_losses)),
        *(
            (f"  {name}", text)
            for name, losses in report.data_sets.items()
            for text in _validation_text(losses)
        ),
        ("tokens/s", f"{report.tokens_per_second:,.0f}"),
        ("seconds", f"{report.seconds:.1f}"),
        *(("died", f"{i.name}: {i.how}; {i.outcome}") for i in report.incidents),
        ("model", report.export or "not written: the run did not come to its end"),
    ]
    print_facts(report.run_dir, facts, console)


def _examples_text(report: GivenReport) -> list[str]:
    if not report.examples:
        return []
    left_out = f", {report.left_out:,} left out as too long" if report.left_out else ""
    return [f"{report.examples:,}{left_out}"]


def _validation_text(found: Mapping[int, float]) -> list[str]:
    if not found:
        return []
    best = min(found, key=lambda step: found[step])
    last = found[max(found)]
    return [f"{last:.4f} at the end, best {found[best]:.4f} after step {best + 1}"]


def _series(records: Sequence[MetricRecord], name: str) -> dict[int, float]:
    """Return what the run as a whole, or a replica, said of its steps."""
    return {
        record.step: record.values[name]
        for record in records
        if name in record.values and record.role != _VALIDATION
    }


def _data_sets(records: Sequence[MetricRecord]) -> dict[str, dict[int, float]]:
    """Return the validation losses of each data set by step."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        if record.role == _VALIDATION:
            for name, loss in of_data_sets(record.values).items():
                found.setdefault(name, {})[record.step] = loss
    return found
