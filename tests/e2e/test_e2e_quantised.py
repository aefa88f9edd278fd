"""Rollouts in fewer bits than the policy trains in: a real run with a real engine."""

import json

import pytest
from real_runs import SMALL, Runner, assert_balanced
from safetensors import safe_open

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 3


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_engines_serve_every_version_in_eight_bits(runner: Runner) -> None:
    run = runner.start(
        *SMALL, f"trainer.steps={STEPS}", "weight_sync.quantised=fp8",
        "rollout.engine.kind=vllm", "model.tiny.hidden_size=64",
        "algorithm.objective.entropy_coefficient=0.5", "learner.optimizer.lr=0.01",
        "staleness.depth=0", "staleness.bound=0",
    )  # fmt: skip
    assert run.finish(deadline_s=600.0) == 0, run.logs()
    assert_balanced(run.report["books"])
    config = json.loads((run.output / "model-fp8" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    with safe_open(run.output / "model-fp8" / "model.safetensors", framework="pt") as tensors:
        stored = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    assert stored["model.layers.0.mlp.down_proj.weight"] == "F8_E4M3"
    assert stored["model.layers.0.mlp.down_proj.weight_scale"] == "F32"
    assert stored["model.embed_tokens.weight"] == "BF16"
    steps = run.metrics("policy")
    assert [record["step"] for record in steps] == list(range(STEPS))
    # Sampled on-policy: what is left is the rounding, and it stays as small as weights change.
    for record in steps:
        assert 1e-5 < record["values"]["mismatch_abs"] < 0.05, record["values"]
