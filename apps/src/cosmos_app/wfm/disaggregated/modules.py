"""What rollout replicas of a world model import, for the process that forks them."""

import json
from collections.abc import Sequence
from pathlib import Path

from cosmos_wfm import DiffusionRlConfig

_LIBRARIES = ("diffusers", "transformers")


def rollout_modules(recipe: DiffusionRlConfig) -> Sequence[str]:
    """Return what replicas import: themselves, and the classes that a pipeline's index names.

    Args:
        recipe: of the run.
    """
    roles = ("cosmos_app.cli", "cosmos_app.wfm.disaggregated.replica", "peft")
    return (*roles, *_classes(Path(recipe.model)))


def _classes(directory: Path) -> Sequence[str]:
    """Return the pipeline's class and its parts'; an index that cannot be read is refused later."""
    try:
        index = json.loads((directory / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    if not isinstance(index, dict):
        return ()
    parts = [named for named in index.values() if isinstance(named, list) and len(named) == 2]
    named = [("diffusers", index.get("_class_name")), *parts]
    return [f"{library}:{name}" for library, name in named if library in _LIBRARIES and name]
