"""How fast a step was and what it held: seconds of its parts, samples and tokens, peak memory.

    step_s                         seconds of a step, of which on the mean of ranks
      sample_s  reward_s             drawing samples, and scoring them in the same process
      wait_s                         for rewards of a service, other ranks, or samples from replicas
      data_s                         making batches: reading and encoding data, drawing noise
      train_s                        the learner's passes and its update
    samples_per_s                  samples of a step by ``step_s``, of the whole run
    generated_per_s_per_rank       samples that a rank, or a replica, draws in a second of drawing
    trained_per_s_per_rank         samples by ``train_s``
    tokens_per_s_per_rank          positions of latents in trained passes, by ``train_s``
    tflops_per_s_per_rank, mfu     operations by ``train_s``, and their share of the device's peak
    peak_memory_mib                of the rank that held most, since it began
    replica_peak_memory_mib        of the replica that held most

Operations are counted as the denoiser runs: matrix products, convolutions and attention of its
first pass of each shape. A pass with gradient counts three times that, one without (old policy,
reference) once. What is computed again for the backward pass is the method's and does not count;
passes that only keep step with other ranks do. Where blocks are compiled and computed again, the
first step, and one after a new shape, run them uncompiled to be counted; of the step with the new
shape neither tokens nor operations are said. ``mfu`` is said where the peak of the device (in
bfloat16) is known.
"""

import resource
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from cosmos_parallel import StepReport, TrainingMesh, device_peak_flops
from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.passes import PassMeter

_MIB = 1 << 20
_NO_ACCELERATORS = ("cpu", "meta")
_STATUS = Path("/proc/self/status")
_PEAK = "VmHWM:"


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawingCost:
    """What a micro-batch of samples took the process that drew it.

    Attributes:
        sample_s: seconds of embedding prompts, passes of the denoiser, and decoding.
        reward_s: seconds until its rewards were there, or were asked for elsewhere.
        peak_memory_mib: that the process had held by then.
    """

    sample_s: float = 0.0
    reward_s: float = 0.0
    peak_memory_mib: float = 0.0


class SpeedMeter:
    """Measures the steps of a run; every rank has one and calls alike."""

    def __init__(
        self,
        adapter: DiffusionModelAdapter,
        mesh: TrainingMesh,
        *,
        copies: Sequence[tuple[nn.Module, Sequence[nn.Module]]] = (),
    ) -> None:
        """Watch a denoiser, and copies of it, each with its blocks."""
        self._mesh = mesh
        self._device = mesh.process.device
        self._passes = PassMeter([(adapter.transformer, adapter.blocks), *copies])
        self._parts: dict[str, float] = {}
        self._begun = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._parts = {}
        self._begun = seconds_now(self._device)

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Count the seconds of the block to a part of the step."""
        begun = seconds_now(self._device)
        try:
            yield
        finally:
            self.add(name, seconds_now(self._device) - begun)

    def add(self, name: str, seconds: float) -> None:
        """Count seconds to a part of the step."""
        self._parts[name] = self._parts.get(name, 0.0) + seconds

    def begin_training(self) -> None:
        """Forget the passes until now, which drew samples."""
        self._passes.take()

    def figures(self, report: StepReport, num_samples: int) -> dict[str, float]:
        """Return the figures of the step, which ends here; every rank calls.

        Args:
            report: of the learner.
            num_samples: of the step, over all ranks.
        """
        passes = self._passes.take()
        num_ranks = self._mesh.process.world_size
        own = [passes.tokens, passes.flops, report.seconds, *self._parts.values()]
        tokens, flops, train_s, *parts = self._sum(own)
        train_s /= num_ranks
        named = {name: sum_ / num_ranks for name, sum_ in zip(self._parts, parts, strict=True)}
        step_s = seconds_now(self._device) - self._begun
        rank_seconds = train_s * num_ranks
        speed = {
            "step_s": step_s,
            **named,
            "train_s": train_s,
            "samples_per_s": num_samples / step_s,
            "trained_per_s_per_rank": num_samples / rank_seconds,
        }
        if tokens:
            speed["tokens_per_s_per_rank"] = tokens / rank_seconds
        if flops:
            speed |= self._operations(flops / rank_seconds)
        held = torch.tensor(peak_memory_mib(self._device), device=self._device)
        return {**speed, "peak_memory_mib": self._mesh.max_(held).item()}

    def drawing_figures(
        self, costs: Sequence[DrawingCost], num_samples: int, *, elsewhere: bool
    ) -> dict[str, float]:
        """Return the figures of whoever drew the samples of the step; every rank calls.

        Args:
            costs: of this rank's micro-batches.
            num_samples: of the step, over all ranks.
            elsewhere: whether other processes drew them, for all ranks of a copy of the model.
        """
        own = [sum(cost.sample_s for cost in costs), sum(cost.reward_s for cost in costs)]
        sample_s, reward_s = self._sum(own)
        held = max((cost.peak_memory_mib for cost in costs), default=0.0)
        most = self._mesh.max_(torch.tensor(held, device=self._device)).item()
        num_ranks = self._mesh.process.world_size
        copies = num_ranks // self._mesh.data_size if elsewhere else 1
        found = {
            "sample_s": sample_s / num_ranks,
            "reward_s": reward_s / num_ranks,
            "generated_per_s_per_rank": num_samples * copies / sample_s if sample_s else 0.0,
        }
        return {**found, "replica_peak_memory_mib": most} if elsewhere else found

    def _operations(self, flops_per_s: float) -> Mapping[str, float]:
        found = {"tflops_per_s_per_rank": flops_per_s / 1e12}
        peak = device_peak_flops(self._device)
        return {**found, "mfu": flops_per_s / peak} if peak else found

    def _sum(self, values: Sequence[float]) -> list[float]:
        own = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        return self._mesh.sum_(own).tolist()


def seconds_now(device: torch.device) -> float:
    """Return a clock's seconds, once the device has done what it was given."""
    if device.type not in _NO_ACCELERATORS:
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()


def peak_memory_mib(device: torch.device) -> float:
    """Return the most that was held so far: of an accelerator what its allocator gave, else RSS.

    RSS is of this process alone, where the system says so (Linux); elsewhere it may be that of the
    process it began as.
    """
    if device.type not in _NO_ACCELERATORS:
        return torch.get_device_module(device).max_memory_allocated(device) / _MIB
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith(_PEAK):
                return int(line.split()[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _MIB
