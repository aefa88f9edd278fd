"""Engines of vLLM in tests: what environment they want, and whether they may be forked."""

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from cosmos_rollout import cpu_environment

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM


def may_fork() -> bool:
    """Threads that computed are missing after a fork, and are waited for: none if there is one."""
    return torch.get_num_threads() == 1


def engine_environment() -> dict[str, str]:
    """Return what belongs in the environment of a process with an engine, on GPU or CPU."""
    return {} if torch.cuda.is_available() else cpu_environment()


def forked_llm(arguments: "AsyncEngineArgs") -> "AsyncLLM":
    """Return somebody's own engine, whose processes are forked from this one if they may be."""
    from vllm.utils.system_utils import set_env_var
    from vllm.v1.engine.async_llm import AsyncLLM

    config = arguments.create_engine_config()
    # making it sets "spawn" where there is no GPU, whatever it was
    chosen = set_env_var("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    with chosen if may_fork() else nullcontext():
        return AsyncLLM.from_vllm_config(config)
