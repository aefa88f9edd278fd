"""Rollouts in fewer bits than the policy trains in: a real run with a real engine."""

import json
from itertools import chain
from pathlib import Path
from statistics import fmean

import pytest
import torch
from real_runs import SMALL, Run, Runner, assert_balanced
from safetensors import safe_open
from versions_of_runs import RECORDED, distances_over_switches

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 3
LORA = (
    "model.training.lora.rank=4",
    "model.training.lora.alpha=8",
    "learner.optimizer.lr=0.05",
    "learner.optimizer.schedule.num_warmup_steps=0",
)
FEWER_BITS = {
    "fp8": (0.02, ("weight_sync.quantised=fp8",)),
    "fp8-adapters": (0.02, ("weight_sync.quantised=fp8", *LORA)),
    "nvfp4": (0.05, ("weight_sync.quantised=nvfp4", "rollout.engine.dtype=bfloat16")),
}
"""How far log-probs may be from those of whole weights, on average, and how a run is set."""


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


@pytest.mark.parametrize("form", FEWER_BITS)
def test_engines_go_on_in_fewer_bits_when_a_version_comes_in_mid_response(
    form: str, runner: Runner, tmp_path: Path
) -> None:
    """What is sampled differs from the weights of its version by its rounding, and by no more.

    So it is for every version, and after each switch, with the keys and values of before kept.
    """
    most, settings = FEWER_BITS[form]
    run = runner.start(
        *SMALL, *RECORDED, "trainer.steps=4", "trainer.groups_per_step=16",
        "rollout.engine.kind=vllm", "model.tiny.hidden_size=64",
        "rollout.sampling.max_new_tokens=48", "rollout.slots=4",
        "algorithm.objective.entropy_coefficient=0.5",
        "learner.optimizer.lr=0.01", "staleness.depth=2", "staleness.bound=3",
        "validation={before=false, after=false}", *settings,
    )  # fmt: skip
    assert run.finish(deadline_s=600.0) == 0, run.logs()
    assert_balanced(run.report["books"])
    assert run.report["switched"] > 0.0, "no version came in mid-response"
    assert run.report["staleness"][1] >= 1
    distances = distances_over_switches(run, "keep", tmp_path)
    for version, of_tokens in distances.own.items():
        assert 1e-5 < fmean(of_tokens) < most, version
    for version, of_tokens in distances.stale.items():
        assert fmean(of_tokens) > 3 * fmean(distances.own[version]), "the versions must differ"
    if form != "nvfp4":  # the rounding of four bits is as large as what follows from old keys
        kept, anew = (fmean(chain(*of.values())) for of in (distances.own, distances.anew))
        assert anew > 2 * kept, "keys and values of old weights are not those of new ones"
    else:
        assert_four_bits_are_stored(run)


def assert_four_bits_are_stored(run: Run) -> None:
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


def assert_close_to_the_policy(run: Run, most: float, num_steps: int) -> None:
    steps = run.metrics("policy")
    assert [record["step"] for record in steps] == list(range(num_steps))
    # Sampled on-policy: what is left is the rounding, and it stays as small as weights change.
    for record in steps:
        assert 1e-5 < record["values"]["mismatch_abs"] < most, record["values"]
