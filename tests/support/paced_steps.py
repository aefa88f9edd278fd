"""A real vLLM whose steps can be told to take long, and are told when each sampled its tokens.

Both ends share a clock, `time.monotonic`, which is the machine's.
"""

import os
import struct
import time
from pathlib import Path

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

_FOLDER = "COSMOS_TEST_PACED_STEPS"
PACED = f"{__name__}:PacedSteps"
"""For vLLM's ``logits_processors``, in an engine that is made in the environment of `Steps`."""


class Steps:
    """The test's end."""

    def __init__(self, folder: Path) -> None:
        """Begin with steps that take no longer than they need."""
        self._folder = folder
        self.environment = {_FOLDER: str(folder)}
        (folder / "sampled").touch()
        self.pace(0.0)

    def pace(self, seconds: float) -> None:
        """Have each step take so much longer from now on."""
        new = self._folder / "pace.new"
        new.write_text(str(seconds))
        new.rename(self._folder / "pace")

    def sampled(self) -> list[float]:
        """Return when each step so far had its logits, in seconds of the monotonic clock."""
        data = (self._folder / "sampled").read_bytes()
        return [at for (at,) in struct.iter_unpack("d", data[: len(data) // 8 * 8])]


class PacedSteps(LogitsProcessor):
    """The engine's end; changes no logits."""

    def __init__(self, vllm_config: object, device: torch.device, is_pin_memory: bool) -> None:
        self._folder = Path(os.environ[_FOLDER])

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        time.sleep(float((self._folder / "pace").read_text()))
        with (self._folder / "sampled").open("ab") as file:
            file.write(struct.pack("d", time.monotonic()))
        return logits

    def is_argmax_invariant(self) -> bool:
        return False  # those that are are left out for greedy requests

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Of what is in the batch nothing matters."""
