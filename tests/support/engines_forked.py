"""Whether an engine of vLLM may be forked from a process of tests, which has computed before."""

import torch


def may_fork() -> bool:
    """Threads that computed are missing after a fork, and are waited for: none if there is one."""
    return torch.get_num_threads() == 1
