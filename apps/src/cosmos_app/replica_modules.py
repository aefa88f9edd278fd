"""What the replicas of a run import, for the process that forks them."""

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

from cosmos_app.preloaded import Shared
from cosmos_app.recipe import LaunchConfig, Recipe

TRAINING = ("torchtitan.distributed", "transformers.models.auto.modeling_auto", "peft")
_TINY = "qwen3"
ENGINES = {
    "transformers": ("cosmos_rollout.engines.transformers_engine",),
    "vllm": (
        "cosmos_rollout.engines.vllm_engine",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.gpu_worker",
    ),
}
_ROLES = {
    "policy": "cosmos_app.roles.policy",
    "rollout": "cosmos_app.roles.rollout",
    "teacher": "cosmos_app.roles.teacher",
}
# importing it changes torch's compiler, also for those that train
_APART = "vllm"


def shared_by_replicas(recipe: Recipe) -> Sequence[Shared]:
    """Return what replicas of one process of a run with rollouts import; nothing if none is to be.

    Those with vLLM have a process of their own to come from.

    Args:
        recipe: of the run.
    """
    if not is_wanted(recipe.launch):
        return ()
    engines = {"rollout": recipe.rollout.engine.kind}
    if recipe.teacher.replicas:
        engines["teacher"] = recipe.teacher.engine.kind
    apart = {role for role, kind in engines.items() if kind == _APART}
    together = engines.keys() - apart
    if recipe.policy.ranks == 1:
        together |= {"policy"}
    found: list[Shared] = []
    if together:
        models = of_models([recipe.model.path, recipe.model.teacher])
        found.append(_shared(together | {"warmup"}, engines, models))
    if apart:
        found.append(_shared(apart, engines, ()))
    return found


def _shared(roles: Set[str], engines: Mapping[str, str], models: Sequence[str]) -> Shared:
    kinds = {engines[role] for role in roles if role in engines}
    modules = (
        "cosmos_app.cli",
        *(_ROLES[role] for role in sorted(roles) if role in _ROLES),
        *(TRAINING if "policy" in roles else ()),
        *(module for kind in sorted(kinds) for module in ENGINES.get(kind, ())),
        *models,
    )
    return Shared(modules=modules, roles=frozenset(roles), with_vllm=_APART in kinds)


def is_wanted(launch: LaunchConfig) -> bool:
    """Whether replicas are to be forked."""
    return launch.preload and not launch.external


def of_models(paths: Iterable[Path | None]) -> list[str]:
    """Return transformers' modules of models; what cannot be read is left to who reads it."""
    kinds = {_TINY if path is None else _kind_of(path) for path in paths}
    return [f"transformers.models.{kind}.modeling_{kind}" for kind in sorted(kinds) if kind]


def _kind_of(path: Path) -> str:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    kind = config.get("model_type") if isinstance(config, dict) else None
    return kind if isinstance(kind, str) else ""
