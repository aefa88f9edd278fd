"""Log-probabilities from hidden states in chunks against whole logits: memory, time, difference.

    python benchmarks/logprobs.py [--tokens 512] [--hidden 512] [--vocabulary 32768] [--cap 30]

Each arm is a process of its own, forward and backward over the same tensors. "extra MiB" is how
far its resident memory rose above what inputs and their gradients take; seconds are processor
seconds of the one thread it has, so that a busy machine does not count. ``whole logits`` is what a
plain training loop does, ``with entropy`` what one does that reports entropies too; the chunked
form always has both. With ``--cap`` logits are bounded, as those of Gemma 2. On a GPU
(``--device cuda``) memory is what torch allocated at most.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cosmos_algos import (
    LogitScaling,
    OutputHead,
    TokenScores,
    chunked_logprobs,
    scores_from_logits,
)

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of the problem."""

    tokens: int
    hidden: int
    vocabulary: int
    rounds: int
    device: str
    cap: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Of one arm.

    Attributes:
        extra_mib: peak memory over inputs and gradients.
        cpu_s: median processor seconds (seconds on a GPU) of forward and backward.
        loss: the sum of log-probabilities, to compare.
        grad_norm: norm of the head's gradient, to compare.
    """

    extra_mib: float
    cpu_s: float
    loss: float
    grad_norm: float


Arm = Callable[[torch.Tensor, OutputHead, torch.Tensor], torch.Tensor]


def whole(hidden: torch.Tensor, head: OutputHead, targets: torch.Tensor) -> torch.Tensor:
    """Project everything, then cross-entropy: no entropies."""
    return -torch.nn.functional.cross_entropy(head.logits(hidden), targets, reduction="none")


def whole_with_entropy(
    hidden: torch.Tensor, head: OutputHead, targets: torch.Tensor
) -> torch.Tensor:
    """Project everything, then log-softmax, log-probability and entropy."""
    scores: TokenScores = scores_from_logits(head.logits(hidden), targets)
    scores.entropies.sum().detach()
    return scores.logprobs


def in_chunks(chunk: int) -> Arm:
    """Return the arm that takes ``chunk`` rows at a time."""

    def run(hidden: torch.Tensor, head: OutputHead, targets: torch.Tensor) -> torch.Tensor:
        return chunked_logprobs(hidden, head, targets, chunk=chunk).logprobs

    return run


ARMS: dict[str, Arm] = {
    "whole logits": whole,
    "whole logits, with entropy": whole_with_entropy,
    "chunks of 64": in_chunks(64),
    "chunks of 256": in_chunks(256),
    "chunks of 1024": in_chunks(1024),
}


def measure(arm: str, sizes: Sizes) -> Result:
    """Run one arm in this process."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(sizes.tokens, sizes.hidden, generator=generator)
    head = torch.randn(sizes.vocabulary, sizes.hidden, generator=generator) / sizes.hidden**0.5
    targets = torch.randint(sizes.vocabulary, (sizes.tokens,), generator=generator)
    hidden, head, targets = (x.to(sizes.device) for x in (hidden, head, targets))
    hidden.requires_grad_().grad = torch.zeros_like(hidden)
    head.requires_grad_().grad = torch.zeros_like(head)
    whole_head = OutputHead(head, scaling=LogitScaling(cap=sizes.cap))
    ARMS[arm](hidden[:2], whole_head, targets[:2]).sum().backward()  # libraries, caches
    before = _memory(sizes.device)
    seconds: list[float] = []
    for _ in range(sizes.rounds):
        _gradient(hidden).zero_()
        _gradient(head).zero_()
        started = _clock(sizes.device)
        loss = ARMS[arm](hidden, whole_head, targets).sum()
        loss.backward()
        seconds.append(_clock(sizes.device) - started)
    return Result(
        extra_mib=(_memory(sizes.device) - before) / _MIB,
        cpu_s=statistics.median(seconds),
        loss=loss.item(),
        grad_norm=_gradient(head).double().norm().item(),
    )


def _clock(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.grad is None:
        raise ValueError("no gradient was computed")
    return tensor.grad


def _memory(device: str) -> float:
    """Return the most bytes held so far."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return float(torch.cuda.max_memory_allocated())


def _row(arm: str, result: Result, base: Result) -> str:
    difference = max(
        abs(result.loss / base.loss - 1.0), abs(result.grad_norm / base.grad_norm - 1.0)
    )
    return (
        f"| {arm} | {result.extra_mib:.0f} | {base.extra_mib / max(result.extra_mib, 1.0):.1f} "
        f"| {result.cpu_s:.2f} | {base.cpu_s / result.cpu_s:.2f} | {difference:.0e} |"
    )


def main() -> None:
    """Run every arm in a process of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cap", type=float, default=None)
    parser.add_argument("--arm", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = Sizes(
        tokens=options.tokens,
        hidden=options.hidden,
        vocabulary=options.vocabulary,
        rounds=options.rounds,
        device=options.device,
        cap=options.cap,
    )
    if options.arm:
        print(json.dumps(asdict(measure(options.arm, sizes))))
        return
    logits_mib = sizes.tokens * sizes.vocabulary * 4 / _MIB
    print(f"{sizes}; the logits are {logits_mib:.0f} MiB\n")
    print("| form | extra MiB | x less | seconds | x faster | relative difference |")
    print("|---|---|---|---|---|---|")
    results: dict[str, Result] = {}
    for arm in ARMS:
        command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--arm", arm]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        results[arm] = Result(**json.loads(done.stdout.splitlines()[-1]))
        print(_row(arm, results[arm], results["whole logits"]), flush=True)


if __name__ == "__main__":
    main()
