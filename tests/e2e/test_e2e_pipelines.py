"""Runs whose policy is cut into pipeline stages, with critic, reference or reward."""

from pathlib import Path

import pytest
import torch
from real_runs import ROOT, SMALL, Runner, assert_balanced
from safetensors.torch import load_file

from cosmos_app.export import export_checkpoint
from cosmos_app.given.trainer import GivenTrainer
from cosmos_app.recipes import load_any_recipe
from cosmos_core.config import config_to_json
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import ParallelConfig, Seat, build_mesh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STAGES = ("policy.ranks=2", "policy.parallel.pp=2")
TINY = (
    "model.tiny.num_layers=2",
    "model.tiny.hidden_size=32",
    "model.tiny.num_heads=2",
    "model.tiny.tie_embeddings=false",
)
PAIRS = (
    f"data.path={ROOT / 'configs' / 'data' / 'preferences.jsonl'}",
    "trainer.validate_every=2",
    "trainer.batch.max_tokens=256",
    "learner.optimizer.lr=0.003",
)


def assert_same_weights(one: Path, other: Path) -> None:
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_preferences_in_stages_go_on_from_a_checkpoint_as_one_process_does(
    runner: Runner, tmp_path: Path
) -> None:
    recipe = ROOT / "configs" / "dpo.toml"
    settings = (*TINY, *PAIRS, *STAGES)
    first = runner.complete(*settings, "trainer.steps=2", recipe=recipe)
    run = runner.complete(*settings, "trainer.steps=4", recipe=recipe, flags=["--resume"])
    steps = [record["values"] for record in run.metrics("controller")]
    assert len(steps) == 4
    model = first.output / "model"
    alone = load_any_recipe(recipe, [*PAIRS, f"model.path={model}", "trainer.steps=4"])
    text = config_to_json(alone)
    with RunDirectory.create(tmp_path / "alone", config_json=text, now_s=0.0) as directory:
        trainer = GivenTrainer(alone, directory, build_mesh(ParallelConfig()))
        for number, found in enumerate(steps):
            expected = trainer.train(Seat(step=number, index=0, names=("alone",), wants_stop=False))
            for name in ("loss", "grad_norm", "margin", "num_passes"):
                assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        validated = trainer.validate()
        assert validated is not None
        assert run.report["validation_losses"]["3"] == pytest.approx(validated.loss, rel=1e-4)
        trainer.close()


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_policy_in_stages_has_a_critic_and_a_reference_that_moves(
    runner: Runner, tmp_path: Path, tied: bool
) -> None:
    # of one matrix for embedding and head, transformers' implementation
    exported = complete_ppo(runner, tmp_path, f"model.tiny.tie_embeddings={str(tied).lower()}")
    weights = load_file(exported / "model.safetensors")
    assert ("lm_head.weight" in weights) != tied


def test_adapters_in_stages_are_sampled_by_beside_a_critic_and_a_reference(
    runner: Runner, tmp_path: Path
) -> None:
    exported = complete_ppo(runner, tmp_path, "model.training.lora={rank=4, alpha=8}")
    adapter = load_file(exported / "adapter" / "adapter_model.safetensors")
    assert {name.split(".layers.")[1][0] for name in adapter} == {"0", "1"}


def complete_ppo(runner: Runner, tmp_path: Path, setting: str) -> Path:
    """Run stages beside a critic and a moving reference; return what is exported."""
    run = runner.complete(
        *SMALL, *TINY, *STAGES, setting,
        "trainer.steps=4", "staleness.depth=0", "staleness.bound=0",
        "validation.before=false", "validation.after=false", "learner.optimizer.lr=0.01",
        "algorithm.objective.entropy_coefficient=0.5", "algorithm.objective.kl.coefficient=0.2",
        "algorithm.objective.kl.reset_every=2", "trainer.tokens_per_batch=128",
        "algorithm.kind=ppo", "algorithm.epochs=2",
        "reward.rewards=[{kind='length', target=0, limit=32}]",
    )  # fmt: skip
    assert_balanced(run.report["books"])
    steps = [record["values"] for record in run.metrics("policy")]
    assert len(steps) == 4
    # sampled by what the stages sent
    assert all(step["mismatch_abs"] < 1e-5 for step in steps)
    for number, step in enumerate(steps):
        assert (step["kl"] > 1e-6) == (number % 2 == 1), steps
        assert (abs(step["critic_value"]) > 1e-4) == (number > 0), steps
    # in one process, which puts no critic into it either
    exported = run.output / "export" / "model"
    export_checkpoint(run.output, tmp_path / "again", step=None)
    assert_same_weights(exported, tmp_path / "again")
    return exported


@pytest.mark.thorough
def test_a_reward_model_in_stages_is_exported_with_the_layer_of_the_last(
    runner: Runner, tmp_path: Path
) -> None:
    recipe = ROOT / "configs" / "reward_model.toml"
    run = runner.complete(*TINY, *PAIRS, *STAGES, "trainer.steps=2", recipe=recipe)
    exported = run.output / "export" / "model"
    assert load_file(exported / "model.safetensors")["score.weight"].abs().max() > 1e-4
    export_checkpoint(run.output, tmp_path / "again", step=None)
    assert_same_weights(exported, tmp_path / "again")
