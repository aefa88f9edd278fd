"""What the replicas of a run import, for the process that forks them."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from cosmos_app.recipe import LaunchConfig, Recipe

TRAINING = ("torchtitan.distributed", "transformers.models.auto.modeling_auto", "peft")
_TINY = "qwen3"
# vLLM is left to who needs it: importing it changes torch's compiler, also for those that train.
_ENGINES = {"transformers": ("cosmos_rollout.engines.transformers_engine",)}


def replica_modules(recipe: Recipe) -> Sequence[str]:
    """Return what replicas of one process of a run with rollouts import; nothing if none is to be.

    Args:
        recipe: of the run.
    """
    if not is_wanted(recipe.launch):
        return ()
    engines = {recipe.rollout.engine.kind}
    roles = ["cosmos_app.cli", "cosmos_app.roles.rollout"]
    if recipe.teacher.replicas:
        roles.append("cosmos_app.roles.teacher")
        engines.add(recipe.teacher.engine.kind)
    if recipe.policy.ranks == 1:
        roles += ["cosmos_app.roles.policy", *TRAINING]
    found = [module for kind in sorted(engines) for module in _ENGINES.get(kind, ())]
    return (*roles, *found, *of_models([recipe.model.path, recipe.model.teacher]))


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
