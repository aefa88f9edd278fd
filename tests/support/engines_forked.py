"""Engines of vLLM in tests: what environment they want, and whether they may be forked."""

import torch

from cosmos_rollout import cpu_environment


def may_fork() -> bool:
    """Threads that computed are missing after a fork, and are waited for: none if there is one."""
    return torch.get_num_threads() == 1


def engine_environment() -> dict[str, str]:
    """Return what belongs in the environment of a process with an engine, on GPU or CPU."""
    return {} if torch.cuda.is_available() else cpu_environment()
