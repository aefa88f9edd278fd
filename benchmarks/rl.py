"""The RL benchmark: asynchronous and synchronous cosmos, and TRL, on one workload and one machine.

    python benchmarks/rl.py [--task sums] [--quick] [--arms async,sync,trl] [--repeats 3]

Every arm starts from the same warmed model, takes the same prompts, samples, optimizer and loss,
and runs alone; repetitions are interleaved (A B C, A B C, ...) so that a machine that drifts
drifts under all of them.
"""

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from measure import end_on_sigterm
from rl_arms import COSMOS_ARMS, ROOT, ArmResult, run_arm, shared_of, write_results
from rl_tables import draw_curves, rl_markdown
from workload import TASKS, prepare_workload

from cosmos_app.recipe import load_recipe

QUICK_STEPS = 24


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--task",
        choices=sorted(TASKS),
        default="digits",
        help="digits to be written backwards, the quickstart's, up to 81 tokens; or sums, five "
        "tokens at most",
    )
    parser.add_argument("--recipe", type=Path, help="the task's by default")
    parser.add_argument("--quick", action="store_true", help="one short repeat, to see it work")
    parser.add_argument(
        "--arms",
        default="async,sync,trl",
        help=f"of {', '.join(COSMOS_ARMS)}; trl has one thread, trl-2 two",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, help="optimizer steps; the recipe's by default")
    parser.add_argument("--targets", help="rewards whose times are compared; the task's by default")
    parser.add_argument("--rollouts", type=int, default=1, help="rollout replicas")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bench", help="scratch directory")
    parser.add_argument("--json", type=Path, help="write every number here")
    parser.add_argument("--figure", type=Path, help="draw the learning curves here")
    return parser.parse_args(arguments)


def _describe(result: ArmResult) -> str:
    last = result.points[-1]
    return (
        f"{result.arm} {result.repeat}: reward {last.reward:.2f} after {last.seconds:.0f} s and "
        f"{last.cpu_s:.0f} CPU s; others kept {result.others_cpus:.2f} CPUs busy"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the arms, one after the other, and print their tables."""
    end_on_sigterm()
    options = _parse(arguments)
    task = TASKS[options.task]
    path = options.recipe or task.recipe
    recipe = load_recipe(path)
    steps, repeats = options.steps or recipe.trainer.steps, options.repeats
    if options.quick:
        steps, repeats = QUICK_STEPS, 1
    if options.targets:
        task = replace(task, targets=tuple(map(float, options.targets.split(","))))
    shared = shared_of(path, recipe, task, steps=steps, rollouts=options.rollouts)
    out = options.out.resolve()
    workload = prepare_workload(out / f"workload-{options.task}", recipe)
    results: list[ArmResult] = []
    for repeat in range(repeats):
        for arm in options.arms.split(","):
            scratch = out / f"rl-{options.task}" / f"{arm}-{repeat}"
            shutil.rmtree(scratch, ignore_errors=True)
            results.append(run_arm(arm, repeat, shared, workload, scratch))
            print(_describe(results[-1]), flush=True)
            write_results(options.json or out / f"rl-{options.task}.json", shared, results)
    print(rl_markdown(shared, results))
    if options.figure:
        draw_curves(results, options.figure)


if __name__ == "__main__":
    main()
