"""The command lines and environments of a run's processes."""

import os
import sys
from collections.abc import Mapping

from cosmos_app.recipe import Recipe
from cosmos_app.supervisor import ChildSpec
from cosmos_core.rundir import RunDirectory

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONUNBUFFERED": "1",
}


def has_gpu() -> bool:
    """Whether this machine computes on a GPU."""
    import torch

    return torch.cuda.is_available()


def threads_per_process(recipe: Recipe, cores: int) -> int:
    """Share the cores among the processes that compute; never fewer than one thread each."""
    computing = recipe.policy.replicas * recipe.policy.ranks + recipe.rollout.replicas
    return max(1, cores // computing)


def environment(recipe: Recipe) -> Mapping[str, str]:
    """Return what every child finds in its environment beside our own."""
    if has_gpu():
        return QUIET
    from cosmos_rollout import cpu_environment

    threads = threads_per_process(recipe, os.cpu_count() or 1)
    return {**QUIET, **cpu_environment(), "OMP_NUM_THREADS": str(threads)}


def policy_names(recipe: Recipe) -> list[str]:
    """Return the names of the policy replicas."""
    return [f"policy-{index}" for index in range(recipe.policy.replicas)]


def rollout_names(recipe: Recipe) -> list[str]:
    """Return the names of the rollout replicas."""
    return [f"rollout-{index}" for index in range(recipe.rollout.replicas)]


def app_command(*arguments: str) -> tuple[str, ...]:
    """Return the command line of one process of ours."""
    return (sys.executable, "-m", "cosmos_app", *arguments)


def torchrun_command(ranks: int, *arguments: str) -> tuple[str, ...]:
    """Return the command line of several ranks, started by torchrun on this machine."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return (*launcher, f"--nproc-per-node={ranks}", "-m", "cosmos_app", *arguments)


def child_specs(recipe: Recipe, run: RunDirectory) -> list[ChildSpec]:
    """Return the controller, the policy replicas and the rollout replicas of a run."""
    shared = environment(recipe)
    where = str(run.path)
    commands = {"controller": app_command("controller", where)}
    for name in policy_names(recipe):
        arguments = ("policy", where, "--replica", name)
        ranks = recipe.policy.ranks
        commands[name] = (
            app_command(*arguments) if ranks == 1 else torchrun_command(ranks, *arguments)
        )
    for name in rollout_names(recipe):
        commands[name] = app_command("rollout", where, "--replica", name)
    return [
        ChildSpec(
            name=name,
            argv=argv,
            environment=shared,
            log=run.logs / f"{name}.log",
            restarts=recipe.launch.restarts,
        )
        for name, argv in commands.items()
    ]


def warmup_spec(recipe: Recipe, run: RunDirectory) -> ChildSpec:
    """Return the process that fine-tunes a freshly built model."""
    return ChildSpec(
        name="warmup",
        argv=app_command("warmup", str(run.path)),
        environment=environment(recipe),
        log=run.logs / "warmup.log",
        restarts=0,
    )
