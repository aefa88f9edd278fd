"""Adapters in a run with rollouts, and preferences on given data: real programs, short."""

import json
from pathlib import Path

import pytest
import torch
from real_runs import ROOT, SMALL, Run, Runner, assert_balanced
from safetensors.torch import load_file
from versions_of_runs import RECORDED, distances_over_switches, furthest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 3
# the entropy bonus moves the adapter whatever the rewards of a random model are
LORA = (
    "model.training.lora.rank=4",
    "model.training.lora.alpha=8",
    "learner.optimizer.lr=0.01",
    "algorithm.objective.entropy_coefficient=0.5",
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_adapters_travel_to_a_real_engine_and_load_in_peft(runner: Runner) -> None:
    peft = pytest.importorskip("peft")
    pytest.importorskip("vllm")
    from transformers import AutoModelForCausalLM

    run = runner.start(
        *SMALL, *LORA, f"trainer.steps={STEPS}", "rollout.engine.kind=vllm",
        "staleness.depth=0", "staleness.bound=0",
    )  # fmt: skip
    assert run.finish(deadline_s=600.0) == 0, run.logs()
    report = run.report
    assert_balanced(report["books"])
    steps = run.metrics("policy")
    assert [record["step"] for record in steps] == list(range(STEPS))
    # sampled on-policy by the merged model: the trainer finds the same log-probabilities
    assert all(record["values"]["mismatch_abs"] < 1e-3 for record in steps), steps[0]["values"]
    base = AutoModelForCausalLM.from_pretrained(run.output / "model")
    exported = AutoModelForCausalLM.from_pretrained(report["export"])
    ids = torch.tensor([[1, 5, 6, 7]])
    before = base(ids).logits
    adapted = peft.PeftModel.from_pretrained(base, str(Path(report["export"]) / "adapter"))
    torch.testing.assert_close(adapted(ids).logits, exported(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, exported(ids).logits, atol=1e-3)
    assert_only_adapters_travelled(run)


def num_bytes(path: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(path).values())


def assert_only_adapters_travelled(run: Run) -> None:
    """Compare what each load fetched with the adapter in its file, and with the model."""
    adapter = num_bytes(Path(run.report["export"]) / "adapter" / "adapter_model.safetensors")
    told = [record["values"] for record in run.metrics("rollout")]
    fetched = [values["wire_mib"] * (1 << 20) for values in told if "wire_mib" in values]
    assert len(fetched) == run.report["num_loads"] > 1
    # and its configuration, as JSON
    assert all(adapter < count < adapter + 2048 for count in fetched), (adapter, fetched)
    assert max(fetched) < 0.3 * num_bytes(run.output / "model" / "model.safetensors")
    assert run.report["wire_mib"][1] == max(fetched) / (1 << 20)


def test_an_adapter_arrives_in_the_midst_of_responses_which_go_on_by_it(
    runner: Runner, tmp_path: Path
) -> None:
    """They keep the keys and values of the adapter before, as by default."""
    pytest.importorskip("vllm")
    run = runner.start(
        *SMALL, *LORA, "trainer.steps=6", "rollout.engine.kind=vllm",
        "rollout.sampling.max_new_tokens=48", *RECORDED,
        "staleness.depth=2", "staleness.bound=4", "validation={before=false, after=false}",
        "learner.optimizer.schedule.num_warmup_steps=0",
    )  # fmt: skip
    assert run.finish(deadline_s=600.0) == 0, run.logs()
    report = run.report
    assert_balanced(report["books"])
    assert report["switched"] > 0.0
    distances = distances_over_switches(run, "keep", tmp_path)
    for version, of_tokens in distances.own.items():
        assert max(of_tokens) < 1e-3, version
    assert furthest(distances.stale) > 1e-2, "the adapters must differ for this to say anything"
    assert furthest(distances.anew) > 2e-3, "keys and values of old adapters are not of new ones"
    assert_only_adapters_travelled(run)


def test_preferences_are_learned_on_two_ranks_and_validated(runner: Runner) -> None:
    recipe = ROOT / "configs" / "dpo.toml"
    run = runner.complete(
        f"data.path={ROOT / 'configs' / 'data' / 'preferences.jsonl'}",
        "trainer.steps=20", "trainer.validate_every=10", "learner.optimizer.lr=0.003",
        "policy.ranks=2", recipe=recipe,
    )  # fmt: skip
    losses = [run.report["losses"][str(step)] for step in range(20)]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < 0.9 * losses[0]
    assert list(map(int, run.report["validation_losses"])) == [9, 19]
    accuracy = [record["values"]["accuracy"] for record in run.metrics("controller")]
    assert accuracy[-1] > 0.5
    assert json.loads((run.output / "config.json").read_text())["kind"] == "preference"


def test_a_teacher_of_another_vocabulary_is_refused_at_the_start(
    runner: Runner, tmp_path: Path
) -> None:
    from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model

    tiny = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, head_dim=32)
    build_tiny_model(tmp_path / "teacher", ["ab"], tiny, seed=0)
    run = runner.start(
        f"data.path={ROOT / 'configs' / 'data' / 'sums.jsonl'}",
        f"teacher={tmp_path / 'teacher'}", "trainer.steps=2", "launch.restarts=5",
        recipe=ROOT / "configs" / "distillation.toml",
    )  # fmt: skip
    assert run.finish() == 2, run.logs()
    assert "they need one vocabulary" in run.text
    assert "died" not in run.text


def test_a_reward_model_of_the_recipe_starts_at_log_2_and_is_exported(runner: Runner) -> None:
    from transformers import AutoModelForSequenceClassification

    run = runner.complete(
        f"data.path={ROOT / 'configs' / 'data' / 'preferences.jsonl'}",
        "trainer.steps=4", "trainer.validate_every=2", "learner.optimizer.lr=0.003",
        recipe=ROOT / "configs" / "reward_model.toml",
    )  # fmt: skip
    losses = [run.report["losses"][str(step)] for step in range(4)]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert len(run.report["losses"]) == 4
    assert list(map(int, run.report["validation_losses"])) == [1, 3]
    model = AutoModelForSequenceClassification.from_pretrained(run.report["export"])
    assert model.config.num_labels == 1
