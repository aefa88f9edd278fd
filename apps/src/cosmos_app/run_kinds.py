"""What a run's recipe says, which may be of another version, told without importing what trains."""

import json
from collections.abc import Mapping
from typing import Any

from cosmos_core.rundir import RunDirectory

GIVEN = frozenset({"distillation", "preference", "reward_model", "sft"})
"""Kinds of runs on given data, which have no controller."""


def read_tables(run: RunDirectory) -> Mapping[str, Any]:
    """Return the tables of the resolved recipe of a run; empty if there is none yet."""
    return json.loads(run.config.read_text(encoding="utf-8")) if run.config.exists() else {}


def has_controller(tables: Mapping[str, Any]) -> bool:
    """Whether runs of such a recipe have one."""
    return tables.get("kind") not in GIVEN
