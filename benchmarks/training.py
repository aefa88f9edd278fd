"""One optimizer step on the same samples, by cosmos, TRL and a plain transformers loop, on a CPU.

    python benchmarks/training.py [--repeats 3] [--quick]

Each run of an arm is a process with one thread; repeats are interleaved. Model, samples, optimizer
and clipping are the same; the first step's loss and gradient norm are printed, so that one sees
that the same step was taken.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from training_data import Result, Sample, Sizes, make, read
from training_titan_data import result_in
from trl_environment import trl_python

from cosmos_algos import (
    GrpoConfig,
    NoCorrection,
    ObjectiveConfig,
    SampleWeights,
    StepRewards,
    TokenBatch,
    collate,
    in_one_row,
    policy_loss,
)
from cosmos_core.trajectory import Trajectory, VersionSpan
from cosmos_parallel import (
    AdamWConfig,
    Learner,
    LearnerConfig,
    ParallelConfig,
    SftBatch,
    build_mesh,
    load_causal_lm,
    plan_micro_batches,
    sft_loss,
)
from cosmos_parallel.gradients import finish_gradients

HERE = Path(__file__).resolve().parent
LR = 1e-4
OWN_ARMS = ("plain sft", "cosmos sft", "cosmos grpo")
ARMS = {"sft": ("plain sft", "trl sft", "cosmos sft"), "grpo": ("trl grpo", "cosmos grpo")}
Batches = Callable[[], "list[SftBatch] | list[TokenBatch]"]


def plain_sft(directory: Path) -> Result:
    """Run padded batches of rows through transformers, as a short script would."""
    from transformers import AutoModelForCausalLM

    sizes, samples = read(directory)
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    tokens = sum(len(s.response) for s in samples)
    order = np.random.default_rng(0)
    ends = [time.process_time()]
    losses: list[float] = []
    norms: list[float] = []
    for _ in range(sizes.steps + 1):
        shuffled = [samples[i] for i in order.permutation(len(samples))]
        total = 0.0
        for start in range(0, len(samples), sizes.rows):
            batch = _padded(shuffled[start : start + sizes.rows])
            loss = model(**batch, num_items_in_batch=tokens, use_cache=False).loss
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        ends.append(time.process_time())
    return Result(
        cpu_s=tuple(b - a for a, b in pairwise(ends[1:])),
        loss=losses[0],
        grad_norm=norms[0],
        tokens=tokens,
    )


def _padded(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    width = max(len(s.prompt) + len(s.response) for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, sample in enumerate(samples):
        start, end = len(sample.prompt), len(sample.prompt) + len(sample.response)
        ids[row, :end] = torch.tensor(sample.prompt + sample.response)
        mask[row, :end] = 1
        labels[row, start:end] = torch.tensor(sample.response)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def cosmos_sft(directory: Path) -> Result:
    """Plan, pack and step with the supervised loss."""
    sizes, samples = read(directory)

    def batches() -> list[SftBatch]:
        lengths = [len(s.prompt) + len(s.response) for s in samples]
        (plan,) = plan_micro_batches(lengths, max_tokens=sizes.tokens)
        return [_row([samples[i] for i in part]) for part in plan]

    return _steps(directory, batches, sft_loss)


def _row(samples: Sequence[Sample]) -> SftBatch:
    ids = [np.array(s.prompt + s.response) for s in samples]
    trained = [np.arange(len(i)) >= len(s.prompt) for i, s in zip(ids, samples, strict=True)]
    positions = [np.arange(len(i)) for i in ids]
    return SftBatch(
        token_ids=torch.from_numpy(np.concatenate(ids))[None],
        trainable=torch.from_numpy(np.concatenate(trained))[None],
        position_ids=torch.from_numpy(np.concatenate(positions))[None],
        num_tokens=sum(map(len, ids)),
    )


def cosmos_grpo(directory: Path) -> Result:
    """Weigh, plan, pack and step with GRPO's loss."""
    sizes, samples = read(directory)
    # the samples are said to be the policy's own, as TRL takes them: nothing to correct
    config = GrpoConfig(objective=ObjectiveConfig(correction=NoCorrection()))
    algorithm = config.build()
    trajectories = [_trajectory(i, s, sizes.samples) for i, s in enumerate(samples)]

    def batches() -> list[TokenBatch]:
        step = StepRewards(
            rewards=[t.reward for t in trajectories],
            groups=[t.group for t in trajectories],
            num_tokens=[t.num_trainable for t in trajectories],
        )
        advantages, weights = algorithm.step_targets(step)
        (plan,) = plan_micro_batches([t.num_tokens for t in trajectories], max_tokens=sizes.tokens)
        return [_batch(trajectories, advantages, weights, part) for part in plan]

    return _steps(directory, batches, policy_loss(config))


def _trajectory(index: int, sample: Sample, num_samples: int) -> Trajectory:
    ids = np.array(sample.prompt + sample.response, dtype=np.int32)
    return Trajectory(
        prompt_id=str(index // num_samples),
        group=str(index // num_samples),
        sibling=index % num_samples,
        attempt=0,
        token_ids=ids,
        logprobs=np.zeros(len(ids), dtype=np.float32),
        trainable=np.arange(len(ids)) >= len(sample.prompt),
        versions=(VersionSpan(0, len(ids)),),
        rewards={"given": sample.reward},
        reward=sample.reward,
        finish_reason="stop",
    )


def _batch(
    trajectories: Sequence[Trajectory],
    advantages: torch.Tensor,
    weights: SampleWeights,
    part: Sequence[int],
) -> TokenBatch:
    chosen = list(part)
    batch = collate([trajectories[i] for i in chosen], advantages[chosen], weights.select(chosen))
    return in_one_row(batch)


def _steps(directory: Path, batches: Batches, loss: Any) -> Result:
    """Take the steps; planning, packing and normalising are timed by themselves as well."""
    sizes, samples = read(directory)
    mesh = build_mesh(ParallelConfig())
    model = load_causal_lm(directory / "model", mesh)
    optimizer = AdamWConfig(lr=LR, betas=(0.9, 0.95))
    learner = Learner(model, LearnerConfig(optimizer=optimizer, max_grad_norm=1.0), mesh=mesh)
    cpu_s: list[float] = []
    overhead_s: list[float] = []
    reports = []
    useful = 0.0
    for _ in range(sizes.steps + 1):
        started = time.process_time()
        made = batches()
        planned = time.process_time()
        reports.append(learner.step(made, loss))
        ended = time.process_time()
        cpu_s.append(ended - started)
        overhead_s.append(planned - started + _normalising_s(list(model.parameters())))
        places = sum(batch.token_ids.numel() for batch in made)
        useful = sum(len(s.prompt) + len(s.response) for s in samples) / places
    return Result(
        cpu_s=tuple(cpu_s[1:]),
        loss=reports[0].loss,
        grad_norm=reports[0].grad_norm,
        tokens=sum(len(s.response) for s in samples),
        overhead_s=tuple(overhead_s[1:]),
        useful=useful,
    )


def _normalising_s(parameters: list[torch.nn.Parameter]) -> float:
    """Return what dividing gradients once costs, on gradients of the same shapes."""
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    started = time.process_time()
    finish_gradients(parameters, factor=0.5)
    seconds = time.process_time() - started
    for parameter in parameters:
        parameter.grad = None
    return seconds


def run_arm(arm: str, directory: Path) -> Result:
    """Run an arm once, in a process of its own."""
    if arm.startswith("trl"):
        script = [str(trl_python()), str(HERE / "training_trl_arm.py"), str(directory)]
        command, path = [*script, arm.partition(" ")[2]], ""
    else:
        command = [sys.executable, str(Path(__file__)), "--arm", arm, "--directory", str(directory)]
        path = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode or "RESULT " not in done.stdout:
        raise RuntimeError(f"{arm}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in result_in(done.stdout).items()
    }
    return Result(**values)


def _speed(result: Result) -> float:
    return result.tokens / statistics.median(result.cpu_s)


def _table(kind: str, found: dict[str, list[Result]]) -> list[str]:
    base = statistics.median(_speed(r) for r in found[ARMS[kind][0]])
    lines = [
        f"| {kind} step | trained tokens per CPU s | x {ARMS[kind][0]} | useful tokens "
        "| planning, packing, normalising | first loss | gradient norm |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS[kind]:
        results = found[arm]
        speeds = sorted(_speed(r) for r in results)
        ratios = [s / statistics.median(r.cpu_s) for r in results for s in r.overhead_s]
        useful = f"{results[0].useful:.1%}" if results[0].useful else ""
        extra = f"{statistics.median(ratios):.2%}" if ratios else ""
        middle = statistics.median(speeds)
        lines.append(
            f"| {arm} | {middle:,.0f} ({speeds[0]:,.0f}-{speeds[-1]:,.0f}) | {middle / base:.2f} "
            f"| {useful} | {extra} | {results[0].loss:.5f} | {results[0].grad_norm:.5f} |"
        )
    return lines


def main() -> None:
    """Run every arm, interleaved, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--arm", default="", choices=("", *OWN_ARMS), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        torch.set_num_threads(1)
        runs = {"plain sft": plain_sft, "cosmos sft": cosmos_sft, "cosmos grpo": cosmos_grpo}
        print("RESULT " + json.dumps(asdict(runs[options.arm](options.directory))))
        return
    sizes = Sizes(vocabulary=512, hidden=64, steps=1) if options.quick else Sizes()
    arms = [arm for kind in ARMS for arm in ARMS[kind]]
    found: dict[str, list[Result]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch), sizes)
        for _ in range(1 if options.quick else options.repeats):
            for arm in arms:
                found[arm].append(run_arm(arm, Path(scratch)))
                print(f"{arm}: {_speed(found[arm][-1]):,.0f} tokens per CPU s", flush=True)
    print(f"\n{sizes}\n")
    for kind in ARMS:
        print("\n".join(_table(kind, found)), end="\n\n")


if __name__ == "__main__":
    main()
