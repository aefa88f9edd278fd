"""Which GPUs of this machine each process of a run sees.

Policies have the first ones, teachers and then rollouts the last; what joins later takes those
between. Engines that do not fit beside the others share a GPU, policies never do: NCCL joins no two
ranks on one. Rollouts that take turns with the policy begin where it does.

```
GPU      0         1         2         3         4         5         6         7
     policy-0  policy-0  policy-1  policy-1            rollout-1 rollout-0 teacher-0
```
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cosmos_app.errors import DataError
from cosmos_app.recipe import PolicyConfig, Recipe
from cosmos_rollout import EngineConfig, SGLangConfig, TransformersConfig, VLLMConfig

SHARERS = "COSMOS_GPU_SHARERS"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceNeeds:
    """How many GPUs the processes of a run compute on.

    Attributes:
        policies: replicas that train.
        policy: GPUs of each.
        teachers: how many.
        teacher: GPUs of each.
        rollouts: replicas that generate, at the start.
        rollout: GPUs of each.
        takes_turns: whether rollouts compute where the policy does.
    """

    policies: int
    policy: int
    teachers: int = 0
    teacher: int = 0
    rollouts: int = 0
    rollout: int = 0
    takes_turns: bool = False


def gpus_of(engine: EngineConfig) -> int:
    """Return how many GPUs an engine computes on where there are any; 0 if it names one itself."""
    if isinstance(engine, VLLMConfig):
        found = engine.engine_arguments()
        degrees = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        shape = [int(found.get(name, 1)) for name in degrees]
        return shape[0] * shape[1] * shape[2]
    if isinstance(engine, SGLangConfig):
        return 0 if engine.device == "cpu" else engine.tensor_parallel
    return int(isinstance(engine, TransformersConfig) and engine.device == "cuda")


def needs_of(recipe: Recipe) -> DeviceNeeds:
    """Return the needs of a run with rollouts."""
    return DeviceNeeds(
        policies=recipe.policy.replicas,
        policy=recipe.policy.ranks,
        teachers=recipe.teacher.replicas,
        teacher=gpus_of(recipe.teacher.engine),
        rollouts=recipe.rollout.replicas,
        rollout=gpus_of(recipe.rollout.engine),
        takes_turns=bool(recipe.rollout.colocate),
    )


def needs_of_policies(policy: PolicyConfig) -> DeviceNeeds:
    """Return the needs of a run without rollouts."""
    return DeviceNeeds(policies=policy.replicas, policy=policy.ranks)


def visible_devices() -> tuple[str, ...]:
    """Return the GPUs that this process sees, under the names that CUDA has for them."""
    import torch

    if not torch.cuda.is_available():
        return ()
    return device_names(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())


def device_names(chosen: str | None, count: int) -> tuple[str, ...]:
    """Return the names of ``count`` devices: those of CUDA_VISIBLE_DEVICES, or their numbers."""
    names = [name.strip() for name in chosen.split(",")] if chosen else map(str, range(count))
    return tuple(names)[:count]


def require_devices(needs: DeviceNeeds, num_devices: int) -> None:
    """Refuse a run that the GPUs of this machine cannot hold; one without any computes on its CPU.

    Raises:
        DataError: naming the setting.
    """
    if not num_devices:
        return
    wanted = {
        "policy.replicas times policy.ranks": needs.policies * needs.policy,
        "rollout.engine": needs.rollout,
        "teacher.engine": needs.teacher if needs.teachers else 0,
    }
    for what, count in wanted.items():
        if count > num_devices:
            raise DataError(
                f"{what} takes {count} GPUs, this machine shows {num_devices}; lower it, or empty "
                "CUDA_VISIBLE_DEVICES to compute on the CPU"
            )


def devices_of(name: str, needs: DeviceNeeds, num_devices: int) -> tuple[int, ...]:
    """Return which GPUs a process has by the name of its replica; none if it needs none."""
    role, _, number = name.partition("-")
    index = int(number) if number.isdecimal() else 0
    count = {"policy": needs.policy, "teacher": needs.teacher, "rollout": needs.rollout}.get(
        role, 0
    )
    if not num_devices or not count:
        return ()
    if role == "policy" or (role == "rollout" and needs.takes_turns):
        first = index * count
    else:
        behind = needs.teachers * needs.teacher if role == "rollout" else 0
        first = num_devices - behind - (index + 1) * count
    return tuple((first + place) % num_devices for place in range(count))


def device_environment(name: str, needs: DeviceNeeds, visible: Sequence[str]) -> dict[str, str]:
    """Return what a process finds in its environment so that it sees its own GPUs alone.

    An engine is told how many compute on the fullest of them, itself included, if it has them not
    alone.
    """
    found = devices_of(name, needs, len(visible))
    if not found:
        return {}
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(visible[device] for device in found)}
    if needs.takes_turns or name.startswith("policy-"):
        return seen
    users = users_of(needs, len(visible))
    sharers = max(len({*users.get(device, ()), name}) for device in found)
    return {**seen, SHARERS: str(sharers)} if sharers > 1 else seen


def users_of(needs: DeviceNeeds, num_devices: int) -> dict[int, list[str]]:
    """Return which processes of the start compute on each GPU."""
    counts: Mapping[str, int] = {
        "policy": needs.policies,
        "teacher": needs.teachers,
        "rollout": needs.rollouts,
    }
    users: dict[int, list[str]] = {}
    for role, count in counts.items():
        for name in (f"{role}-{index}" for index in range(count)):
            for device in devices_of(name, needs, num_devices):
                users.setdefault(device, []).append(name)
    return users


def placement_lines(needs: DeviceNeeds, visible: Sequence[str]) -> list[str]:
    """Return in words who has which GPU, and what those may have to change who share one."""
    users = users_of(needs, len(visible))
    lines = [f"GPU {visible[device]}: {', '.join(users[device])}" for device in sorted(users)]
    if any(len(names) > 1 for names in users.values()) and not needs.takes_turns:
        lines.append(
            "engines that share a GPU start in turn and divide its memory, unless "
            "rollout.engine.gpu_memory_share (or memory_share) says otherwise"
        )
    return lines
