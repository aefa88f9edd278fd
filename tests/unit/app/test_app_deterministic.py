"""``trainer.deterministic``: the same run twice, and a resumed one, are the same bit for bit."""

import json
import os
from pathlib import Path

import pytest
import torch

from cosmos_app.given.data_config import SftDataConfig
from cosmos_app.given.recipe import (
    GivenModelConfig,
    GivenTrainerConfig,
    SftRecipe,
)
from cosmos_app.given.trainer import GivenTrainer
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_app.settings import kernels
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import (
    AdamWConfig,
    LearnerConfig,
    ParallelConfig,
    Seat,
    SftBatchConfig,
    build_mesh,
)

TINY = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, head_dim=32)
STEPS = 6


@pytest.fixture
def recipe(tmp_path: Path) -> SftRecipe:
    torch.set_num_threads(1)
    build_tiny_model(tmp_path / "model", ["0123456789+="], TINY, seed=0)
    rows = [{"prompt": f"{n}+{n}=", "response": str(2 * n)} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return SftRecipe(
        model=GivenModelConfig(path=tmp_path / "model"),
        data=SftDataConfig(path=tmp_path / "rows.jsonl"),
        learner=LearnerConfig(optimizer=AdamWConfig(lr=0.01)),
        trainer=GivenTrainerConfig(
            steps=STEPS, batch=SftBatchConfig(batch_size=5, max_tokens=24), deterministic=True
        ),
    )


def trained(recipe: SftRecipe, directory: Path, stops: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Train to each stop by a process of its own, as far as state goes; return the last state."""
    with RunDirectory.create(directory, config_json="{}", now_s=0.0) as run:
        return launched(recipe, run, stops)


def launched(
    recipe: SftRecipe, run: RunDirectory, stops: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for stop in stops:
        # another launch draws other random numbers before it loads its checkpoint
        torch.manual_seed(stop)
        with kernels(recipe.seed, are_deterministic=True):
            assert torch.are_deterministic_algorithms_enabled()
            trainer = GivenTrainer(recipe, run, build_mesh(ParallelConfig()))
            try:
                while trainer.step < stop:
                    trainer.train(Seat(step=trainer.step, index=0, names=("a",), wants_stop=False))
                trainer.save(None)
            finally:
                trainer.close()
        learner = trainer.learner
        state = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
        for name, parameter in learner.model.named_parameters():
            for quantity, value in learner.optimizer.state[parameter].items():
                state[f"{name}.{quantity}"] = value.clone()
    assert not torch.are_deterministic_algorithms_enabled()
    return state


def test_a_run_twice_and_a_resumed_one_are_equal_bit_for_bit(
    recipe: SftRecipe, tmp_path: Path
) -> None:
    once = trained(recipe, tmp_path / "once", (STEPS,))
    for name, stops in (("again", (STEPS,)), ("resumed", (2, 3, STEPS))):
        other = trained(recipe, tmp_path / name, stops)
        assert once.keys() == other.keys()
        assert all(torch.equal(once[key], other[key]) for key in once), name


@pytest.mark.parametrize(("before", "inside"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_cublas_is_told_wherever_a_run_was_started(
    before: str | None, inside: str, monkeypatch: pytest.MonkeyPatch
):
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, before or "")
    if before is None:
        monkeypatch.delenv(name)
    with kernels(0, are_deterministic=True):
        assert os.environ[name] == inside
