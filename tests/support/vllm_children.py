"""How vLLM starts its processes in scripts of tests."""

import os


def fork_children() -> None:
    """Have vLLM fork its processes from this one, which has imported what they do.

    It may not have computed yet. Where there is no GPU vLLM sets the way to "spawn" whatever it
    was, so that every process imports vLLM anew; it keeps what it has read once if it is told so.
    """
    from vllm.envs import enable_envs_cache

    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    enable_envs_cache()
