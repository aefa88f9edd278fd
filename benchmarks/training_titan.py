"""A training step of cosmos-parallel beside torchtitan's own trainer, on the same Llama.

    python benchmarks/training_titan.py [--size 1b] [--rows 4] [--length 4096] [--repeats 3]

Both start from one checkpoint and take the same rows of tokens: next-token cross-entropy, AdamW,
clipping, FSDP2 over ``--ranks`` ranks. Each run is a tree of processes of its own; repeats are
interleaved. The first step's loss and gradient norm show that the same step was taken. The figure
is tokens per second of the median step; with a GPU, MFU as torchtitan counts operations and peaks.
Without one both compute in float32, which compares what stands around the kernels; torchtitan's
trainer then takes one rank, because gloo lacks a reduction that it wants.

On a GPU torchtitan attends with its default (``flex``), cosmos with scaled_dot_product_attention;
``--attention sdpa`` gives both the same.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
import training_titan_arm
from training_titan_data import (
    BETAS,
    LR,
    MEETING,
    SIZES,
    WARM_STEPS,
    WEIGHT_DECAY,
    Result,
    Work,
    batch_of,
    device_type,
    finished,
    model_in,
    result_in,
    tokens_of,
    write_model,
)

from cosmos_parallel import (
    AdamWConfig,
    Learner,
    LearnerConfig,
    ModelConfig,
    ParallelConfig,
    build_mesh,
    device_peak_flops,
    init_distributed,
    load_causal_lm,
    sft_loss,
    shutdown_distributed,
)

ARMS = ("torchtitan", "cosmos")


def run_cosmos(directory: Path, work: Work, rank: int) -> Result:
    """Take the steps with the learner of cosmos-parallel; one process of all ranks calls."""
    process = init_distributed(
        rank,
        work.ranks,
        init_method=f"tcp://127.0.0.1:{MEETING}",
        device=f"cuda:{rank}" if device_type() == "cuda" else "cpu",
    )
    mesh = build_mesh(ParallelConfig(), process)
    config = ModelConfig(
        implementation="native",
        compute_dtype="bfloat16" if process.device.type == "cuda" else "float32",
        compile="inductor" if work.compile else "none",
    )
    model = load_causal_lm(model_in(directory), mesh, config)
    optimizer = AdamWConfig(lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
    learner = Learner(model, LearnerConfig(optimizer=optimizer, max_grad_norm=1.0), mesh=mesh)
    seconds, reports = [], []
    for step in range(WARM_STEPS + work.steps):
        batch = batch_of(tokens_of(work, step, rank))
        started = finished()
        reports.append(learner.step([batch], sft_loss))
        seconds.append(finished() - started)
    shutdown_distributed()
    return Result(
        seconds=seconds[WARM_STEPS:], loss=reports[0].loss, grad_norm=reports[0].grad_norm
    )


def run_tree(arm: str, directory: Path, work: Work) -> Result:
    """Run an arm once, on ranks of its own, and return what the first found."""
    command = [sys.executable, str(Path(__file__)), "--arm", arm, "--directory", str(directory)]
    command += ["--work", json.dumps(asdict(work))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(work.ranks)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{arm}: exit codes {[rank.returncode for rank in ranks]}")
    return Result(**result_in(printed[0]))


def table(work: Work, found: dict[str, list[Result]]) -> str:
    """Tokens per second of the whole mesh, their ratio, and MFU where the peak is known."""
    num_tokens = work.ranks * work.rows * work.length
    flops = found["torchtitan"][0].flops_per_token
    peak = device_peak_flops(torch.device(device_type()))
    medians = {
        arm: [num_tokens / statistics.median(result.seconds) for result in found[arm]]
        for arm in ARMS
    }
    base = statistics.median(medians["torchtitan"])
    lines = [
        "| step | tokens per s | x torchtitan | MFU | first loss | gradient norm |",
        "|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        middle = statistics.median(medians[arm])
        mfu = f"{middle * flops / (peak * work.ranks):.1%}" if peak else ""
        lines.append(
            f"| {arm} | {middle:,.0f} ({min(medians[arm]):,.0f}-{max(medians[arm]):,.0f}) "
            f"| {middle / base:.3f} | {mfu} | {found[arm][0].loss:.5f} "
            f"| {found[arm][0].grad_norm:.5f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run both arms, interleaved, and print the table."""
    on_gpu = device_type() == "cuda"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="1b" if on_gpu else "tiny")
    parser.add_argument("--rows", type=int, default=4 if on_gpu else 2, help="a rank and step")
    parser.add_argument("--length", type=int, default=4096 if on_gpu else 256)
    parser.add_argument("--steps", type=int, default=20 if on_gpu else 10)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--attention", choices=("flex", "sdpa"), default="")
    parser.add_argument("--compile", action="store_true", help="every layer, by inductor")
    parser.add_argument("--quick", action="store_true", help="the smallest form")
    parser.add_argument("--arm", choices=ARMS, default="", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        run = run_cosmos if options.arm == "cosmos" else training_titan_arm.run
        result = run(options.directory, Work(**json.loads(options.work)), options.rank)
        print("RESULT " + json.dumps(asdict(result)))
        return
    work = Work(
        size="tiny" if options.quick else options.size,
        rows=options.rows,
        length=64 if options.quick else options.length,
        steps=2 if options.quick else options.steps,
        ranks=options.ranks,
        attention=options.attention or ("flex" if on_gpu else "sdpa"),
        compile=options.compile,
    )
    found: dict[str, list[Result]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch), work.size)
        for _ in range(1 if options.quick else options.repeats):
            for arm in ARMS:
                found[arm].append(run_tree(arm, Path(scratch), work))
                middle = statistics.median(found[arm][-1].seconds)
                print(f"{arm}: {middle:.4f} s a step", file=sys.stderr, flush=True)
    print(f"{work}\n\n{table(work, found)}")


if __name__ == "__main__":
    main()
