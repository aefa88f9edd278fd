"""Rollouts in fewer bits than the policy trains in: a real run with a real engine."""

import json

import pytest
import torch
from real_runs import SMALL, Run, Runner, assert_balanced
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
    assert_close_to_the_policy(run, 0.05, STEPS)


def test_engines_go_on_in_eight_bits_when_a_version_comes_in_mid_response(runner: Runner) -> None:
    """What is sampled ahead of training differs from it by its rounding as well, and by no more."""
    run = runner.start(
        *SMALL, "trainer.steps=4", "trainer.groups_per_step=16", "weight_sync.quantised=fp8",
        "rollout.engine.kind=vllm", "rollout.engine.kv=recompute", "model.tiny.hidden_size=64",
        "rollout.sampling.max_new_tokens=48", "rollout.slots=4",
        "algorithm.objective.entropy_coefficient=0.5",
        "learner.optimizer.lr=0.01", "staleness.depth=2", "staleness.bound=3",
        "validation={before=false, after=false}",
    )  # fmt: skip
    assert run.finish(deadline_s=600.0) == 0, run.logs()
    assert_balanced(run.report["books"])
    assert run.report["switched"] > 0.0, "no version came in mid-response"
    assert run.report["staleness"][1] >= 1
    assert 1e-5 < run.report["mismatch"][0] < 0.05, "of tokens of the version trained on"


def test_engines_serve_every_version_in_four_bits(runner: Runner) -> None:
    run = runner.start(
        *SMALL, "trainer.steps=2", "weight_sync.quantised=nvfp4",
        "rollout.engine.kind=vllm", "rollout.engine.dtype=bfloat16", "model.tiny.hidden_size=64",
        "algorithm.objective.entropy_coefficient=0.5", "learner.optimizer.lr=0.01",
        "staleness.depth=0", "staleness.bound=0",
    )  # fmt: skip
    assert run.finish(deadline_s=600.0) == 0, run.logs()
    assert_balanced(run.report["books"])
    config = json.loads((run.output / "model-nvfp4" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "NVFP4"
    with safe_open(run.output / "model-nvfp4" / "model.safetensors", framework="pt") as tensors:
        stored = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    layer = "model.layers.0"
    packed = stored[f"{layer}.mlp.down_proj.weight"]
    assert (packed.dtype, packed.shape) == (torch.uint8, (64, 128))  # of [64, 256]
    for fused in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        block = "self_attn" if "q_proj" in fused else "mlp"
        scales = {stored[f"{layer}.{block}.{part}.weight_scale_2"].item() for part in fused}
        assert len(scales) == 1, fused
    log = (run.output / "logs" / "rollout-0.log").read_text()
    assert "differs across" not in log, log  # vLLM warns of scales that do
    assert_close_to_the_policy(run, 0.1, 2)


def assert_close_to_the_policy(run: Run, most: float, num_steps: int) -> None:
    steps = run.metrics("policy")
    assert [record["step"] for record in steps] == list(range(num_steps))
    # Sampled on-policy: what is left is the rounding, and it stays as small as weights change.
    for record in steps:
        assert 1e-5 < record["values"]["mismatch_abs"] < most, record["values"]
