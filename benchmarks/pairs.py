"""Real runs of recipes that together hold every pair of options: what `check` takes has to work.

    python benchmarks/pairs.py rl [--most 40] [--only 3 17] [--seed 0] [--list]
    python benchmarks/pairs.py given
    python benchmarks/pairs.py wfm

The options are `LEVELS` of `pairs_rl.py`, `pairs_given.py` and `pairs_wfm.py`, each with the
overrides of a recipe that stand for it; what does not go together, and `check` therefore refuses,
is `CONFLICTS`. Any two options that go together meet in one of the rows, of which the first hold
most pairs, so that with --most the time is well spent. Each is checked as `cosmos-app check` does
and run to its end with a tiny model; its books, steps, figures, validations and exported model are
looked at. One in --kill-each is killed at a random moment, whole or one process of it, and has to
come to the same end, by itself or with --resume. What became of each is a line of `results.jsonl`,
with what to run again by hand; rows that are there are not run again. A row takes half a minute of
a CPU.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pairs_given
import pairs_rl
import pairs_wfm
from measure import end_on_sigterm, pids_of
from pairs_cover import Row, covering_rows
from pairs_judge import judge_given, judge_rl, judge_wfm, records_of

ROOT = Path(__file__).resolve().parent.parent
SWEEPS = {"rl": pairs_rl, "given": pairs_given, "wfm": pairs_wfm}
_LONGEST_S = 400.0


class SweptRun:
    """One ``cosmos-app run`` of the sweep, and again with --resume if it was cut off."""

    def __init__(
        self,
        output: Path,
        recipe: Path,
        overrides: Sequence[str],
        victims: Sequence[str],
        ranks: int,
    ) -> None:
        self._output = output
        self._victims = victims
        torchrun = ["cosmos_app.torchrun", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        self._program = [sys.executable, "-m", *(torchrun if ranks > 1 else ()), "cosmos_app"]
        self._arguments = [str(recipe), f"output={output}", *overrides]
        self._log = output.with_suffix(".log")
        shutil.rmtree(output, ignore_errors=True)
        self._log.unlink(missing_ok=True)

    def finish(self, rng: random.Random | None) -> str:
        """Run to the end, through a death if there is a generator; return what went wrong."""
        process = self._start()
        if rng is not None and process.poll() is None:
            self._wait_for_step(process, rng)
            victim = rng.choice(self._victims)
            self._note(f"killing {victim}")
            if victim != "all":
                self._kill_one(victim)
            elif process.poll() is None:
                process.kill()
                process.wait()
                time.sleep(3.0)  # what it had started ends by itself
                process = self._start("--resume")
        try:
            code = process.wait(timeout=_LONGEST_S)
        except subprocess.TimeoutExpired:
            self._end(process)
            return f"did not end in {_LONGEST_S:g} s"
        return "" if code == 0 else f"exit code {code}"

    def _start(self, *flags: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*self._program, "run", *self._arguments, *flags],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
            )

    def _note(self, text: str) -> None:
        with self._log.open("a") as log:
            log.write(f"--- {text}\n")

    def _wait_for_step(self, process: subprocess.Popen[bytes], rng: random.Random) -> None:
        due, deadline = rng.randrange(3), time.monotonic() + _LONGEST_S
        while process.poll() is None and time.monotonic() < deadline:
            done = {
                record["step"]
                for record in records_of(self._output)
                if record.get("role", "controller") == "controller"
            }
            if len(done) >= due and (self._output / "logs").exists():
                break
            time.sleep(0.1)
        time.sleep(rng.uniform(0.0, 1.0))

    def _kill_one(self, role: str) -> None:
        names = ("policy", "learner") if role == "policy" else (role,)
        found = [pid for name in names for pid in pids_of(name, str(self._output))]
        kept = pids_of("cosmos_app.kept")
        for pid in found:
            if pid not in kept:
                os.kill(pid, signal.SIGKILL)
                return

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(timeout=30.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def refusal_of(recipe: Path, overrides: Sequence[str]) -> str:
    """Return why `cosmos-app check` refuses a recipe; empty if it does not."""
    done = subprocess.run(
        [sys.executable, "-m", "cosmos_app", "check", str(recipe), *overrides, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def sweep_one(number: int, row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Check and run a row; return what became of it."""
    sweep, folder = SWEEPS[options.sweep], options.out / options.sweep
    rng = random.Random(f"{options.seed}/{number}")
    recipe = ROOT / sweep.recipe_of(row)
    overrides = sweep.overrides_of(row, options.out / "files")
    found: dict[str, Any] = {"number": number, "row": row, "overrides": overrides}
    begun = time.monotonic()
    if refused := refusal_of(recipe, overrides):
        return {**found, "refused": refused}
    output = folder / f"{number:03d}"
    dies = rng.randrange(options.kill_each) == 0 if options.kill_each else False
    problem = SweptRun(output, recipe, overrides, sweep.VICTIMS, sweep.num_ranks(row)).finish(
        rng if dies else None
    )
    problems = [problem] if problem else []
    if not problems:
        try:
            problems = judge(output, row, options.sweep, died=dies)
        except (KeyError, OSError, RuntimeError, ValueError) as error:  # a finding, too
            problems = [f"{type(error).__name__}: {error}"]
    if not problems:
        shutil.rmtree(output)
    return {**found, "died": dies, "problems": problems, "seconds": time.monotonic() - begun}


def judge(output: Path, row: Row, sweep: str, *, died: bool) -> list[str]:
    """Return what is wrong with a run that ended."""
    if sweep == "rl":
        return judge_rl(output, row, steps=pairs_rl.STEPS, groups=pairs_rl.GROUPS, died=died)
    if sweep == "wfm":
        return judge_wfm(output, steps=pairs_wfm.STEPS)
    return judge_given(output, row, steps=pairs_given.STEPS)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", choices=SWEEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=10**6, help="rows in this call")
    parser.add_argument("--only", type=int, nargs="+", help="these rows, also if they were run")
    parser.add_argument("--kill-each", type=int, default=4, help="one in so many dies; 0: none")
    parser.add_argument("--list", action="store_true", help="print the rows, run nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/pairs")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep; return 0 if every row that was accepted came to a right end."""
    end_on_sigterm()
    options = parse(arguments)
    options.out = options.out.resolve()
    sweep = SWEEPS[options.sweep]
    factors = {factor: tuple(levels) for factor, levels in sweep.LEVELS.items()}
    rows = list(covering_rows(factors, sweep.CONFLICTS, options.seed))
    if options.list:
        for number, row in enumerate(rows):
            print(number, row)
        return 0
    for each in SWEEPS.values():
        each.write_files(options.out / "files")
    (options.out / options.sweep).mkdir(parents=True, exist_ok=True)
    path = options.out / options.sweep / "results.jsonl"
    results = {}
    if path.exists():
        for line in path.read_text().splitlines():
            found = json.loads(line)
            results[found["number"]] = found
    due = options.only or [n for n in range(len(rows)) if results.get(n, {}).get("row") != rows[n]]
    for number in due[: options.most]:
        results[number] = found = sweep_one(number, rows[number], options)
        with path.open("a") as file:
            file.write(json.dumps(found) + "\n")
        verdict = "; ".join(found.get("problems", ())) or found.get("refused") or "passed"
        died = ", killed" if found.get("died") else ""
        print(f"{number}/{len(rows)}{died}, {found.get('seconds', 0):.0f} s: {verdict}", flush=True)
    bad = sorted(n for n, found in results.items() if found.get("problems") or "refused" in found)
    print(f"{len(results)} of {len(rows)} rows were run; refused or wrong: {bad or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
