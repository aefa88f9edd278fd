"""Bit for bit the same run twice: deterministic kernels, and a seed for all that is random."""

import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def deterministic() -> Generator[None]:
    """Have torch use deterministic kernels inside the block, and refuse what has none.

    On CUDA ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` must be in the environment before the first kernel.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmarked = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
        torch.backends.cudnn.benchmark = benchmarked
