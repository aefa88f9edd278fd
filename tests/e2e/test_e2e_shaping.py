"""What is left out of a loss, and what lengths do to rewards, from the recipe to the weights."""

import json
from pathlib import Path

import pytest
import torch
from real_runs import SMALL, Runner
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_shaped_samples_train_alike_on_one_rank_on_two_and_on_two_replicas(
    runner: Runner, tmp_path: Path
) -> None:
    """Truncated samples, shared prefixes and budgets at once, over many micro-batches."""
    data = tmp_path / "sums.jsonl"
    prompts = [f"{first}+{second}=" for first in range(6) for second in range(5)]
    rows = [{"prompt": p, "answer": "3", "budget": 4} for p in prompts]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        *SMALL,
        "staleness.depth=0",
        "staleness.bound=0",
        "trainer.steps=3",
        "trainer.mask_truncated=true",
        "trainer.tokens_per_batch=24",
        f"data.path={data}",
        "algorithm.kind=dapo",
        "length_reward={kind='budget', rate=0.1}",
        "rollout.shared_prefixes=once",
        "rollout.sampling.max_new_tokens=10",
        "learner.optimizer={kind='sgd', lr=0.1}",
    )
    one = runner.complete(*settings, name="one")
    first = one.metrics("policy")[0]["values"]
    assert 0.1 < first["truncated"] < 0.9
    assert first["truncated"] <= first["masked"] < 1.0  # some said what another one had said
    assert first["num_passes"] > 2
    weights = {
        name: load_file(run.output / "export" / "model" / "model.safetensors")
        for name, run in {
            "one": one,
            "ranks": runner.complete(*settings, "policy.ranks=2", name="ranks"),
            "replicas": runner.complete(*settings, "policy.replicas=2", name="replicas"),
        }.items()
    }
    begun = load_file(one.output / "model" / "model.safetensors")
    assert difference(begun, weights["one"]) > 1e-3
    assert difference(weights["one"], weights["ranks"]) < 1e-5
    assert difference(weights["one"], weights["replicas"]) < 1e-5


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_a_run_of_nothing_but_truncated_samples_goes_on_to_its_end(runner: Runner) -> None:
    run = runner.complete(
        *SMALL,
        "trainer.steps=2",
        "trainer.mask_truncated=true",
        "rollout.sampling.max_new_tokens=1",
        "rollout.engine.context_length=64",
        name="all",
    )
    values = [record["values"] for record in run.metrics("policy")]
    assert all(step["masked"] >= 0.8 for step in values)
    assert run.report["steps"] == 2
