"""The command lines and environments of a run's processes."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from cosmos_app.devices import DeviceNeeds, device_environment, needs_of, visible_devices
from cosmos_app.interfaces import on_loopback
from cosmos_app.quiet import QUIET
from cosmos_app.recipe import LaunchConfig, PolicyConfig, Recipe
from cosmos_app.supervisor import ChildSpec
from cosmos_core.rundir import RunDirectory

Command = tuple[str, ...]
MEETING = "meeting"
_OF_MEETINGS = {"RUST_LOG": "error"}


def has_gpu() -> bool:
    """Whether this machine computes on a GPU."""
    import torch

    return torch.cuda.is_available()


def environment(recipe: Recipe) -> Mapping[str, str]:
    """Return what every child of a run with rollouts finds in its environment beside our own."""
    quiet = {**QUIET, **_OF_MEETINGS, **on_loopback(os.environ)}
    if has_gpu():
        return quiet
    from cosmos_rollout import cpu_environment

    computing = recipe.policy.replicas * recipe.policy.ranks + recipe.rollout.replicas
    computing += recipe.teacher.replicas
    return {**quiet, **cpu_environment(), "OMP_NUM_THREADS": threads_of_each(computing)}


def training_environment(policy: PolicyConfig) -> Mapping[str, str]:
    """Return the same for a run without rollouts; a number of threads that is set stays."""
    quiet = {**QUIET, **_OF_MEETINGS, **on_loopback(os.environ)}
    if has_gpu():
        return quiet
    threads = os.environ.get("OMP_NUM_THREADS", threads_of_each(policy.replicas * policy.ranks))
    return {**quiet, "OMP_NUM_THREADS": threads}


def threads_of_each(computing: int) -> str:
    """Share the cores among the processes that compute; never fewer than one thread each."""
    return str(max(1, (os.cpu_count() or 1) // computing))


def policy_names(policy: PolicyConfig) -> list[str]:
    """Return the names of the replicas that train."""
    return [f"policy-{index}" for index in range(policy.replicas)]


def rollout_names(recipe: Recipe) -> list[str]:
    """Return the names of the rollout replicas."""
    return [f"rollout-{index}" for index in range(recipe.rollout.replicas)]


def teacher_names(recipe: Recipe) -> list[str]:
    """Return the names of the teachers that this run has of its own."""
    return [f"teacher-{index}" for index in range(recipe.teacher.replicas)]


def app_command(*arguments: str) -> Command:
    """Return the command line of one process of ours."""
    return (sys.executable, "-m", "cosmos_app", *arguments)


def torchrun_command(ranks: int, *arguments: str) -> Command:
    """Return the command line of several ranks, started by torchrun on this machine."""
    launcher = (sys.executable, "-m", "cosmos_app.torchrun", "--standalone")
    return (*launcher, f"--nproc-per-node={ranks}", "-m", "cosmos_app", *arguments)


def policy_commands(role: str, policy: PolicyConfig, run: RunDirectory) -> dict[str, Command]:
    """Return the command line of every replica that trains, by its name."""
    return {name: policy_command(role, policy, run, name) for name in policy_names(policy)}


def policy_command(role: str, policy: PolicyConfig, run: RunDirectory, name: str) -> Command:
    """Return the command line of a replica that trains."""
    arguments = (role, str(run.path), "--replica", name)
    several = policy.ranks > 1
    return torchrun_command(policy.ranks, *arguments) if several else app_command(*arguments)


def meeting_command(run: RunDirectory) -> Command:
    """Return the command line of the place where replicas that come and go meet."""
    return app_command(MEETING, str(run.path))


def specs_of(
    commands: Mapping[str, Command],
    run: RunDirectory,
    launch: LaunchConfig,
    surroundings: Mapping[str, str],
    needs: DeviceNeeds,
) -> list[ChildSpec]:
    """Return how to start each command, with a log and GPUs of its own."""
    visible = visible_devices()
    return [
        ChildSpec(
            name=name,
            argv=argv,
            environment={**surroundings, **device_environment(name, needs, visible)},
            log=run.logs / f"{name}.log",
            restarts=launch.restarts,
        )
        for name, argv in commands.items()
    ]


def child_specs(recipe: Recipe, run: RunDirectory) -> list[ChildSpec]:
    """Return the controllers, the policies, the teachers and the rollout replicas of a run.

    Where others start the replicas, this machine starts the controllers alone.
    """
    where = str(run.path)
    commands = {n: app_command("controller", where, "--name", n) for n in controller_names(recipe)}
    if recipe.elastic is not None:
        commands[MEETING] = meeting_command(run)
    if not recipe.launch.external:
        commands |= policy_commands("policy", recipe.policy, run)
        commands |= {
            n: app_command("teacher", where, "--replica", n) for n in teacher_names(recipe)
        }
    specs = [_spared(spec, recipe) for spec in _specs_in(recipe, commands, run)]
    names = [] if recipe.launch.external else rollout_names(recipe)
    return [*specs, *(rollout_spec(recipe, run, name) for name in names)]


def _specs_in(
    recipe: Recipe, commands: Mapping[str, Command], run: RunDirectory
) -> list[ChildSpec]:
    """Return how to start processes of a run with rollouts."""
    return specs_of(commands, run, recipe.launch, environment(recipe), needs_of(recipe))


def controller_names(recipe: Recipe) -> list[str]:
    """Return the names of the controller and of those that stand by."""
    return ["controller", *(f"standby-{index}" for index in range(recipe.launch.standbys))]


def rollout_spec(recipe: Recipe, run: RunDirectory, name: str) -> ChildSpec:
    """Return a rollout replica."""
    command = {name: app_command("rollout", str(run.path), "--replica", name)}
    (spec,) = _specs_in(recipe, command, run)
    return _spared(spec, recipe)


def replica_spec(recipe: Recipe, run: RunDirectory, name: str) -> ChildSpec:
    """Return a replica of the kind its name begins with, to be added to a run."""
    if not name.startswith("policy-"):
        return rollout_spec(recipe, run, name)
    command = {name: policy_command("policy", recipe.policy, run, name)}
    (spec,) = _specs_in(recipe, command, run)
    return _spared(spec, recipe)


def _spared(spec: ChildSpec, recipe: Recipe) -> ChildSpec:
    """Return a child with those that go on without it, if its role has such."""
    role = spec.name.partition("-")[0]
    if role in {"rollout", "teacher"}:
        return replace(spec, group=role)
    if role == "policy" and recipe.elastic is not None:
        return replace(spec, group=role, needed=recipe.elastic.min_replicas)
    return spec


def warmup_spec(recipe: Recipe, run: RunDirectory) -> ChildSpec:
    """Return the process that fine-tunes a freshly built model."""
    command = {"warmup": app_command("warmup", str(run.path))}
    (spec,) = _specs_in(recipe, command, run)
    return replace(spec, restarts=0)
