"""Settings that depend on where a run lies, and those that hold for a whole process."""

import contextlib
import os
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

from cosmos_parallel import LearnerConfig, deterministic, seed_everything


def bad_steps_kept(config: LearnerConfig, run: Path, *, keep: bool) -> LearnerConfig:
    """Return the learner's settings with ``bad_steps/`` of the run for steps that are not finite.

    A directory that the recipe names stays.
    """
    if not keep or config.dump_directory is not None:
        return config
    return replace(config, dump_directory=run / "bad_steps")


@contextlib.contextmanager
def kernels(seed: int, *, are_deterministic: bool) -> Generator[None]:
    """Seed everything, and inside the block have deterministic kernels if asked for.

    Called before the first kernel: cuBLAS looks into the environment when it is first used, and
    torch refuses to call what it does deterministic otherwise.
    """
    if are_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    seed_everything(seed)
    with deterministic() if are_deterministic else contextlib.nullcontext():
        yield
