"""Memory and speed of a training step by what is kept for the backward pass. Needs a CUDA device.

    python benchmarks/activation_memory.py [--size 1b] [--rows 4] [--length 4096] [--steps 4]

Everything is kept, or recomputed layer by layer, or held in host memory, or both. Each way is a
process of its own and takes the same steps: AdamW of a Llama in bfloat16 with float32 weights. The
peak is of torch's allocator over the steps, without what the weights and the optimizer have.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from torch._C._distributed_c10d import HashStore
from training_titan_data import SIZES, batch_of, finished, model_in, result_in, write_model

from cosmos_parallel import (
    Learner,
    LearnerConfig,
    ModelConfig,
    ParallelConfig,
    build_mesh,
    init_distributed,
    load_causal_lm,
    sft_loss,
    shutdown_distributed,
)

WAYS: dict[str, tuple[Literal["none", "full"], bool]] = {
    "kept": ("none", False),
    "recomputed": ("full", False),
    "in host memory": ("none", True),
    "recomputed, in host memory": ("full", True),
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Take the steps one way; return peak bytes, seconds a step, and the losses."""
    checkpointing, offloaded = WAYS[options.way]
    process = init_distributed(0, 1, store=HashStore(), device="cuda:0")
    mesh = build_mesh(ParallelConfig(), process)
    config = ModelConfig(
        implementation="native", compute_dtype="bfloat16", activation_checkpointing=checkpointing
    )
    model = load_causal_lm(model_in(options.directory), mesh, config)
    learner = Learner(model, LearnerConfig(offload_activations=offloaded), mesh=mesh)
    chance = torch.Generator().manual_seed(0)
    losses, seconds, resting = [], [], 0
    for turn in range(1 + options.steps):
        rows = torch.randint(
            0, SIZES[options.size]["vocab_size"], (options.rows, options.length), generator=chance
        )
        batch = batch_of(rows)
        started = finished()
        losses.append(learner.step([batch], sft_loss).loss)
        seconds.append(finished() - started)
        if turn == 0:
            resting = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
    peak = torch.cuda.max_memory_allocated()
    shutdown_distributed()
    return {
        "peak": peak - resting,
        "seconds": statistics.median(seconds[1:]),
        "losses": losses,
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """Peaks and times, and the last loss, which is the same for all."""
    kept = found["kept"]
    lines = ["| activations | peak GiB | of kept | s a step | x kept | last loss |"]
    lines.append("|---" * 6 + "|")
    for way, one in found.items():
        lines.append(
            f"| {way} | {one['peak'] / 2**30:.2f} | {one['peak'] / kept['peak']:.2f} "
            f"| {one['seconds']:.3f} | {one['seconds'] / kept['seconds']:.2f} "
            f"| {one['losses'][-1]:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure every way in a process of its own and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--way", choices=WAYS, default="", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here: nothing was measured")
    if options.way:
        print("RESULT " + json.dumps(measure(options)))
        return
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch), options.size)
        for way in WAYS:
            command = [sys.executable, __file__, *sys.argv[1:]]
            command += ["--way", way, "--directory", scratch]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[way] = result_in(done.stdout)
            print(f"{way}: {found[way]['peak'] / 2**30:.2f} GiB", file=sys.stderr, flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
