"""A whole run whose rollouts play episodes of two turns, and learn from what was said in both."""

import json
from pathlib import Path

import numpy as np
import pytest
from real_runs import SMALL, Runner, assert_balanced
from transformers import AutoTokenizer

from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_app.samples import read_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENVIRONMENT = '''
class Twice:
    """Asks again once; an episode in four breaks the environment after its first reply."""

    tools = ()

    async def play(self, row, chat, seed):
        reply = await chat.reply([{"role": "user", "content": row.prompt}])
        if seed % 4 == 0:
            raise KeyError("broken")
        if not reply.is_last:
            reply = await chat.reply([{"role": "user", "content": "again"}])
        return {"length": len(reply.text) / 10}

    async def aclose(self):
        pass
'''
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% else %}:{% endif %}{% endfor %}"
)


def test_episodes_of_two_turns_are_trained_on_and_broken_ones_are_counted(
    runner: Runner, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    rows = [{"prompt": f"say {word}", "answer": word} for word in ("yes", "no", "again") * 8]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tmp_path / "model"
    config = TinyModelConfig(hidden_size=32, num_layers=1, num_heads=2, tie_embeddings=True)
    build_tiny_model(model, [json.dumps(row) + ":" for row in rows], config, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    run = runner.complete(
        *SMALL,
        f"data.path={tmp_path / 'my.jsonl'}",
        f"model.path={model}",
        "trainer.steps=2",
        "rollout.record=true",
        "rollout.sampling.max_new_tokens=60",
        "rollout.scoring=4",
        f"rollout.environment={{kind='python', function='{tmp_path / 'mine.py'}:Twice'}}",
        "rollout.episode.max_turns=2",
    )
    assert run.report["steps"] == 2
    assert_balanced(run.report["books"])
    (record,) = (run.output / "trajectories").glob("*.bin")
    trajectories = list(read_trajectories(record))
    turns = {trajectory.metrics["turns"] for trajectory in trajectories}
    assert 2.0 in turns
    for trajectory in trajectories:
        starts = np.count_nonzero(np.diff(trajectory.trainable.astype(int), prepend=0) == 1)
        assert starts == trajectory.metrics["turns"]
        assert trajectory.reward == pytest.approx(sum(trajectory.rewards.values()))
    assert run.report["failures"]["reward environment: KeyError"] > 0
