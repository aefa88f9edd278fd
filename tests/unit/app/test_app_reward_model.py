"""A reward model from pairs: it learns, transformers loads it, and a reward of a run uses it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from cosmos_algos import RewardModelConfig
from cosmos_app.export import export_checkpoint
from cosmos_app.given.data_config import PreferenceDataConfig
from cosmos_app.given.recipe import (
    GivenModelConfig,
    GivenTrainerConfig,
    RewardModelRecipe,
)
from cosmos_app.given.trainer import GivenTrainer
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_core.config import config_to_json
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import (
    AdamWConfig,
    LearnerConfig,
    ParallelConfig,
    Seat,
    SftBatchConfig,
    build_mesh,
)
from cosmos_rollout import ModelReward, RewardInput

STEPS = 40


def assert_same_weights(one: Path, other: Path) -> None:
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def preferring(tmp_path: Path, tied: bool, padding: str | None) -> RewardModelRecipe:
    """Write a tiny model, and pairs whose better answers are right."""
    tiny = TinyModelConfig(
        hidden_size=16, num_layers=1, num_heads=2, head_dim=32, tie_embeddings=tied
    )
    build_tiny_model(tmp_path / "model", ["0123456789+=abc"], tiny, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.pad_token = padding
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": "abc"} for n in range(8)]
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    return RewardModelRecipe(
        model=GivenModelConfig(path=tmp_path / "model"),
        data=PreferenceDataConfig(path=data, held_out=2),
        algorithm=RewardModelConfig(centering=0.01),
        learner=LearnerConfig(optimizer=AdamWConfig(lr=0.01)),
        trainer=GivenTrainerConfig(
            steps=STEPS, batch=SftBatchConfig(batch_size=4, max_tokens=32, layout="padded")
        ),
    )


@pytest.mark.parametrize(("tied", "padding"), [(True, "<pad>"), (False, "<eos>"), (False, None)])
def test_a_trained_reward_model_rewards_the_better_answer(
    tmp_path: Path, request: pytest.FixtureRequest, tied: bool, padding: str | None
) -> None:
    from transformers import AutoModelForSequenceClassification

    torch.set_num_threads(1)
    recipe = preferring(tmp_path, tied, padding)
    run = RunDirectory.create(tmp_path / "run", config_json=config_to_json(recipe), now_s=0.0)
    request.addfinalizer(run.close)
    trainer = GivenTrainer(recipe, run, build_mesh(ParallelConfig()))
    try:
        seats = [Seat(step=step, index=0, names=("a",), wants_stop=False) for step in range(STEPS)]
        figures = [trainer.train(seat) for seat in seats]
        # every reward is 0 at first: log 2 for each pair
        assert figures[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
        assert figures[-1]["loss"] < 0.1
        assert figures[-1]["accuracy"] == 1.0
        found = trainer.validate()
        assert found is not None
        assert found.loss < 0.3
        trainer.save(found.loss)
        trainer.export()
    finally:
        trainer.close()
    export_checkpoint(run.path, tmp_path / "again", step=None)
    assert_same_weights(run.export / "model", tmp_path / "again")

    export = run.export / "model"
    model, info = AutoModelForSequenceClassification.from_pretrained(
        export, output_loading_info=True
    )
    assert type(model).__name__ == "Qwen3ForSequenceClassification"
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys"))
    tokenizer = AutoTokenizer.from_pretrained(export)
    ids = [*tokenizer("1+1=")["input_ids"], *tokenizer("2")["input_ids"], tokenizer.eos_token_id]
    head = trainer._model.get_submodule("value_head")
    hidden = trainer._model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
    expected = head(hidden).item()
    assert model(torch.tensor([ids])).logits.item() == pytest.approx(expected, rel=1e-4)

    # beside a longer one, with what the tokenizer pads with
    together = tokenizer.pad({"input_ids": [ids, ids[:1] + ids]}, return_tensors="pt")
    assert model(**together).logits[0].item() == pytest.approx(expected, rel=1e-4)

    score = ModelReward(path=export).build()
    good = score(RewardInput(prompt="1+1=", response="2"))
    assert good == pytest.approx(expected, rel=1e-4)
    assert good > score(RewardInput(prompt="1+1=", response="abc")) + 1.0
