"""Replicas with vLLM come from a process of their own, as importing it changes who trains."""

from pathlib import Path

import pytest

from cosmos_app.recipe import load_recipe
from cosmos_app.replica_modules import shared_by_replicas

VLLM = "cosmos_rollout.engines.vllm_engine"
TRANSFORMERS = "cosmos_rollout.engines.transformers_engine"
TEACHER = (
    "algorithm.kind=on_policy_distillation",
    "model.teacher=m",
    "teacher.replicas=1",
    "teacher.engine.kind=transformers",
)


@pytest.mark.parametrize(
    ("changes", "roles", "engines"),
    [
        (["rollout.engine.kind=vllm"], ["policy warmup", "rollout"], ["", VLLM]),
        (["rollout.engine.kind=transformers"], ["policy rollout warmup"], [TRANSFORMERS]),
        (["rollout.engine.kind=scripted"], ["policy rollout warmup"], [""]),
        # torchrun starts ranks itself
        (["rollout.engine.kind=vllm", "policy.ranks=2"], ["rollout"], [VLLM]),
        (
            ["rollout.engine.kind=transformers", "policy.ranks=2"],
            ["rollout warmup"],
            [TRANSFORMERS],
        ),
        (
            ["rollout.engine.kind=vllm", *TEACHER],
            ["policy teacher warmup", "rollout"],
            [TRANSFORMERS, VLLM],
        ),
        (["rollout.engine.kind=vllm", "launch.preload=false"], [], []),
    ],
)
def test_what_is_imported_for_whom(
    tmp_path: Path, changes: list[str], roles: list[str], engines: list[str]
):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    found = shared_by_replicas(load_recipe(recipe, changes))
    assert [" ".join(sorted(each.roles)) for each in found] == roles
    told = [[m for m in each.modules if m in (VLLM, TRANSFORMERS)] for each in found]
    assert [" ".join(each) for each in told] == engines
    for each in found:
        assert ("peft" in each.modules) == ("policy" in each.roles)
