"""Loss curves with products in 8 bits beside those in bfloat16, from one model over the same rows.

    python benchmarks/fp8_curves.py [--size 1b] [--steps 200] [--recipes rowwise,tensorwise]
        [--leave o_proj,down_proj] [--figure curves.png]

Rows are walks through a random graph of 1,024 tokens with eight ways on from each, so that there is
something to learn. The rate rises for the first tenth of the steps. The figures are the mean loss
of the last tenth against bfloat16's, and how many steps later than bfloat16 half of the fall is
done that it makes in the second half of the run: a model that leaves a plateau late has a large gap
and may meet the others afterwards. A second bfloat16 run over other rows says what such figures
mean, and so does ``float32`` among the recipes: the same rows, without bfloat16's rounding. Without
a GPU all is emulated, which shows the rounding and no speed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore
from training_titan_data import (
    SIZES,
    batch_of,
    device_type,
    finished,
    model_in,
    result_in,
    write_model,
)

from cosmos_parallel import (
    AdamWConfig,
    Learner,
    LearnerConfig,
    LowPrecisionConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    build_mesh,
    init_distributed,
    load_causal_lm,
    sft_loss,
    shutdown_distributed,
)

TOKENS, WAYS = 1024, 8
OTHER_ROWS = "bfloat16, other rows"
FLOAT32 = "float32"


def walks(rows: int, length: int, seed: int) -> torch.Tensor:
    """Rows of tokens: ``int64[rows, length]``; which token follows which is always the same."""
    ways = torch.randint(0, TOKENS, (TOKENS, WAYS), generator=torch.Generator())
    chance = torch.Generator().manual_seed(seed)
    token = torch.randint(0, TOKENS, (rows,), generator=chance)
    found = [token]
    for _ in range(length - 1):
        token = ways[token, torch.randint(0, WAYS, (rows,), generator=chance)]
        found.append(token)
    return torch.stack(found, dim=1)


def curve(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Train once and return the losses and the seconds of each step."""
    device = "cuda:0" if device_type() == "cuda" else "cpu"
    process = init_distributed(0, 1, store=HashStore(), device=device)
    mesh = build_mesh(ParallelConfig(), process)
    low = None
    if options.arm not in {"bfloat16", OTHER_ROWS, FLOAT32}:
        low = LowPrecisionConfig(recipe=options.arm, emulate=device == "cpu" or options.emulate)
        more = tuple(part for part in options.leave.split(",") if part)
        low = replace(low, leave=low.leave + more)
    config = ModelConfig(
        implementation="transformers",
        compute_dtype="float32" if options.arm == FLOAT32 else "bfloat16",
        compile="inductor" if options.compile else "none",
        low_precision=low,
    )
    model = load_causal_lm(model_in(directory), mesh, config)
    schedule = ScheduleConfig(num_warmup_steps=max(1, options.steps // 10))
    optimizer = AdamWConfig(lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, schedule=schedule)
    learner = Learner(model, LearnerConfig(optimizer=optimizer, max_grad_norm=1.0), mesh=mesh)
    first = 10**6 if options.arm == OTHER_ROWS else 0
    losses, seconds = [], []
    for step in range(options.steps):
        batch = batch_of(walks(options.rows, options.length, first + step))
        started = finished()
        losses.append(learner.step([batch], sft_loss).loss)
        seconds.append(finished() - started)
    shutdown_distributed()
    return {"losses": losses, "seconds": statistics.median(seconds[len(seconds) // 2 :])}


def half_fallen(base: list[float], losses: list[float]) -> int | None:
    """The step after which half of the fall is done that ``base`` makes in its second half.

    Losses are means of a fortieth of the steps; ``None`` if it is not done within the run.
    """
    width = max(1, len(base) // 40)
    smooth = [statistics.mean(base[max(0, end - width) : end]) for end in range(1, len(base) + 1)]
    level = (smooth[len(base) // 2] + smooth[-1]) / 2
    for end in range(1, len(losses) + 1):
        if statistics.mean(losses[max(0, end - width) : end]) <= level:
            return end
    return None


def delay(base: list[float], losses: list[float]) -> str:
    """By how many steps later than ``base`` half of its fall is done, or more than how many."""
    first, then = half_fallen(base, base), half_fallen(base, losses)
    if first is None:
        return "no fall"
    return f"> {len(losses) - first}" if then is None else f"{then - first:+d}"


def table(found: dict[str, dict[str, Any]]) -> str:
    """The loss at a few steps, gap and delay against bfloat16, and the speed."""
    steps = len(found["bfloat16"]["losses"])
    marks = sorted({0, steps // 10, steps // 4, steps // 2, steps - 1})
    tail = max(1, steps // 10)
    base = statistics.mean(found["bfloat16"]["losses"][-tail:])
    names = [f"step {mark + 1}" for mark in marks]
    lines = [
        f"| products | {' | '.join(names)} | last tenth | of bfloat16 | steps later | s a step |",
        "|---" * (len(marks) + 5) + "|",
    ]
    for arm, one in found.items():
        last = statistics.mean(one["losses"][-tail:])
        values = " | ".join(f"{one['losses'][mark]:.4f}" for mark in marks)
        later = delay(found["bfloat16"]["losses"], one["losses"])
        lines.append(
            f"| {arm} | {values} | {last:.4f} | {last / base - 1:+.2%} | {later} "
            f"| {one['seconds']:.3f} |"
        )
    return "\n".join(lines)


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the losses: all of them, and on a scale of their own those of the second half."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    whole, end = figure.subplots(1, 2)
    for arm, one in found.items():
        losses = one["losses"]
        half = len(losses) // 2
        numbers = range(1, len(losses) + 1)
        whole.plot(numbers, losses, label=arm, linewidth=1)
        end.plot(numbers[half:], losses[half:], linewidth=1)
    for panel in (whole, end):
        panel.set(xlabel="step")
        panel.grid(alpha=0.3)
    whole.set(ylabel="loss, nats a token")
    whole.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train every arm in a process of its own and print the table."""
    on_gpu = device_type() == "cuda"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="1b" if on_gpu else "tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8 if on_gpu else 4)
    parser.add_argument("--length", type=int, default=2048 if on_gpu else 64)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--recipes", default="rowwise,tensorwise", help="or float32")
    parser.add_argument("--leave", default="", help="parts of names of layers to leave as they are")
    parser.add_argument("--compile", action="store_true", help="every layer, by inductor")
    parser.add_argument("--emulate", action="store_true", help="products without the hardware's")
    parser.add_argument("--figure", type=Path, help="draw the curves here")
    parser.add_argument("--quick", action="store_true", help="the smallest form")
    parser.add_argument("--arm", default="", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.size, options.steps, options.rows, options.length = "tiny", 4, 2, 32
    if options.arm:
        print("RESULT " + json.dumps(curve(options, options.directory)))
        return
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch), options.size)
        for arm in ("bfloat16", OTHER_ROWS, *options.recipes.split(",")):
            command = [sys.executable, __file__, *sys.argv[1:]]
            command += ["--arm", arm, "--directory", scratch]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            found[arm] = result_in(done.stdout)
            print(f"{arm}: {found[arm]['losses'][-1]:.4f}", file=sys.stderr, flush=True)
    if options.figure is not None:
        draw(found, options.figure)
    print(table(found))


if __name__ == "__main__":
    main()
