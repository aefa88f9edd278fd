"""Late imports of two libraries whose lazy modules type checkers misread."""

import importlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


def library(name: str) -> Any:
    """Import late and without types."""
    return importlib.import_module(name)


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Draw from a seed inside the block; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
