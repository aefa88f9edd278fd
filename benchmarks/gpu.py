"""All that wants a GPU, in the order of what it tells for its time; half an hour at the most.

    python benchmarks/gpu.py [--quick] [--only weightsync,training,...]

Each part is a process with a time limit; one that fails or is late is told, and the next begins.
After each, what was found stands in benchmarks/RESULTS.md (with ``--quick``, the smallest form of
everything, in the scratch directory), and what the part printed under runs/bench/gpu.
"""

import argparse
import datetime
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from run import HERE, RESULTS, ROOT, machine, replace_section, versions

SCRATCH = ROOT / "runs" / "bench" / "gpu"
RUN = ("-m", "cosmos_app", "run", "configs/quickstart.toml", f"output={SCRATCH / 'run'}")
Rows = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One process.

    Attributes:
        name: of the part.
        command: of Python, in full.
        quick: in the smallest form.
        limit_s: when it is stopped.
        wanted: in words.
        holds: whether the table that it printed is as wanted; without one the exit code says it.
    """

    name: str
    command: tuple[str, ...]
    quick: tuple[str, ...]
    limit_s: float
    wanted: str
    holds: Callable[[Rows], bool] | None = None


def rows_of(printed: str) -> Rows:
    """Return the cells of the first Markdown table by the first cell of their row and the head."""
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {cells[0]: dict(zip(split[0], cells, strict=True)) for cells in split[2:]}


def near_a_copy(rows: Rows) -> bool:
    """Whether all work has 80 % of a copy's bandwidth, and CUDA IPC takes 1.2 times its time."""
    speeds = {name: float(cells["of copy"]) for name, cells in rows.items() if name != "copy"}
    ipc = speeds.pop("read over CUDA IPC")
    return min(speeds.values()) >= 0.8 and ipc >= 1 / 1.2


def near_torchtitan(rows: Rows) -> bool:
    """Whether the learner has 97 % of the trainer's MFU, on the same step."""
    first, ours = rows["torchtitan"], rows["cosmos"]
    losses = [float(cells["first loss"]) for cells in (first, ours)]
    return float(ours["x torchtitan"]) >= 0.97 and abs(losses[1] / losses[0] - 1) < 0.01


def spares_memory(rows: Rows) -> bool:
    """Whether each way of not keeping activations needs less memory, for the same losses."""
    kept = float(rows["kept"]["last loss"])
    others = [cells for name, cells in rows.items() if name != "kept"]
    same = all(abs(float(cells["last loss"]) / kept - 1) < 0.001 for cells in others)
    return same and all(float(cells["of kept"]) < 0.8 for cells in others)


def near_bfloat16(rows: Rows) -> bool:
    """Whether products in 8 bits end within 1 % of bfloat16's loss, or as near as other rows do."""
    found = {
        name: abs(float(cells["of bfloat16"].rstrip("%"))) / 100 for name, cells in rows.items()
    }
    most = max(0.01, found["bfloat16, other rows"])
    return all(value <= most for value in found.values())


PARTS = (
    Part(
        name="weightsync",
        command=(str(HERE / "weightsync_gpu.py"), "--mib", "4096"),
        quick=(str(HERE / "weightsync_gpu.py"), "--mib", "16", "--repeats", "2"),
        limit_s=200,
        wanted="0.80 of a copy's bandwidth; CUDA IPC 0.83",
        holds=near_a_copy,
    ),
    Part(
        name="training",
        command=(
            str(HERE / "training_titan.py"),
            *("--attention", "sdpa", "--steps", "12", "--repeats", "2"),
        ),
        quick=(str(HERE / "training_titan.py"), "--quick", "--attention", "sdpa"),
        limit_s=360,
        wanted="0.97 of torchtitan's MFU",
        holds=near_torchtitan,
    ),
    Part(
        name="memory",
        command=(str(HERE / "activation_memory.py"), "--steps", "2"),
        quick=(
            *(str(HERE / "activation_memory.py"), "--size", "tiny", "--rows", "1"),
            *("--length", "64", "--steps", "1"),
        ),
        limit_s=200,
        wanted="0.8 of the memory, the same losses",
        holds=spares_memory,
    ),
    Part(
        name="fp8",
        command=(
            *(str(HERE / "fp8_curves.py"), "--steps", "300", "--rows", "4"),
            *("--figure", str(HERE / "fp8_curves.png")),
        ),
        quick=(str(HERE / "fp8_curves.py"), "--quick", "--emulate", "--recipes", "rowwise"),
        limit_s=500,
        wanted="within 1 % of bfloat16's loss, or as near as other rows",
        holds=near_bfloat16,
    ),
    Part(
        name="run",
        command=(
            *(*RUN, "trainer.steps=40", "trainer.checkpoint_every=20"),
            *("rollout.replicas=1", "rollout.engine.gpu_memory_share=0.3"),
        ),
        quick=(
            *(*RUN, "trainer.steps=2", "trainer.checkpoint_every=0", "warmup.steps=0"),
            *("rollout.replicas=1", "model.tiny.num_layers=1"),
            *("rollout.engine.kind=transformers", "rollout.engine.device=cuda"),
            *("trainer.groups_per_step=4", "rollout.slots=4", "data.arithmetic.held_out=16"),
        ),
        limit_s=240,
        wanted="asynchronous RL with vLLM ends by itself",
    ),
    Part(
        name="tests",
        command=("-m", "pytest", "-q", "-m", "gpu"),
        quick=("-m", "pytest", "-q", "-m", "gpu", "tests/unit/weightsync"),
        limit_s=300,
        wanted="all tests marked gpu pass",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a part.

    Attributes:
        part: which.
        arguments: of Python.
        seconds: that it took.
        code: of its exit; ``None`` if it was stopped.
        printed: to standard output.
    """

    part: Part
    arguments: Sequence[str]
    seconds: float
    code: int | None
    printed: str

    @property
    def table(self) -> str:
        """What it printed of tables."""
        return "\n".join(line for line in self.printed.splitlines() if line.startswith("|"))

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.code is None:
            return f"stopped after {self.part.limit_s:.0f} s"
        if self.code:
            return f"failed (exit code {self.code})"
        if self.part.holds is None:
            return "yes"
        try:
            return "yes" if self.part.holds(rows_of(self.printed)) else "**no**"
        except (IndexError, KeyError, ValueError) as error:
            return f"no such figures: {error!r}"


def run_part(part: Part, arguments: Sequence[str], scratch: Path) -> Outcome:
    """Run a part to its end or its limit, with all that it starts; its words go to files."""
    scratch.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(scratch / "run", ignore_errors=True)  # a run begins in no directory of another
    out, err = scratch / f"{part.name}.out", scratch / f"{part.name}.err"
    started = time.monotonic()
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            code = process.wait(part.limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = None
    seconds = time.monotonic() - started
    return Outcome(
        part=part, arguments=arguments, seconds=seconds, code=code, printed=out.read_text()
    )


def section(outcomes: Sequence[Outcome], device: str) -> str:
    """Return what RESULTS.md says: whether each part is as wanted, and the tables."""
    today = datetime.datetime.now(datetime.UTC).date()
    lines = [f"{today} · {device} · {machine()} · {versions()}", ""]
    lines += ["| part | wanted | is it so | s |", "|---|---|---|---|"]
    lines += [
        f"| {o.part.name} | {o.part.wanted} | {o.verdict} | {o.seconds:.0f} |" for o in outcomes
    ]
    for one in outcomes:
        if one.table:
            shown = shlex.join(["python", *(a.replace(f"{ROOT}/", "") for a in one.arguments)])
            lines += ["", f"`{shown}`", "", one.table]
    return "\n".join(lines)


def device_name() -> str:
    """Return the GPUs in a line, with their driver where it can be asked."""
    name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    if shutil.which("nvidia-smi") is None:
        return name
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    version = re.match(r"[\d.]+", found)
    return f"{name}, driver {version[0]}" if version else name


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen parts and write down what they found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smallest form of everything")
    parser.add_argument("--only", default="", help="parts, with commas; all by default")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",") if options.only else [part.name for part in PARTS]
    unknown = set(chosen) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"no parts {sorted(unknown)}; there are {[part.name for part in PARTS]}")
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here: nothing was measured")
    target = RESULTS
    if options.quick:
        target = SCRATCH / "RESULTS-quick.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(RESULTS, target)
    outcomes: list[Outcome] = []
    for part in PARTS:
        if part.name not in chosen:
            continue
        print(f"== {part.name}, at most {part.limit_s:.0f} s", flush=True)
        outcomes.append(run_part(part, part.quick if options.quick else part.command, SCRATCH))
        print(f"{outcomes[-1].table}\n{part.wanted}: {outcomes[-1].verdict}", flush=True)
        written = replace_section(target.read_text(), "gpu", section(outcomes, device_name()))
        target.write_text(written)
    print(f"written to {target}; all words under {SCRATCH}")
    sys.exit(any(outcome.code != 0 for outcome in outcomes))


if __name__ == "__main__":
    main()
