"""Whole runs of many turns, judged by their tokens alone.

The model is a random one that likes some tokens: digits, calls of two tools, and the end of a turn,
which it does not begin with.
What is trained on has to be what it sampled, with the log-probabilities that it gave, and the rest
what the environment said: worked out here from the tokens. In vLLM new weights arrive in the midst
of turns, and each token has the log-probability of those that sampled it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from real_runs import SMALL, SUMS, Run, Runner, assert_balanced
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer
from versions_of_runs import model_of_version, reference_logprobs, versions_of

from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_app.samples import read_trajectories
from cosmos_core.trajectory import Trajectory

USER, TOOL, MODEL, END = "<u>", "<t>", "<a>", "<eos>"
TEMPLATE = (
    "{% for m in messages %}"
    "{{ {'user': '<u>', 'tool': '<t>', 'assistant': '<a>'}[m.role] }}{{ m.content or '' }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
CALLS = {
    name: f'<tool_call>{{"name": "{name}", "arguments": {{"a": 2, "b": 3}}}}</tool_call>'
    for name in ("add", "fail")
}
_MOST_FAILED = 3
"""So many samples of each step: marks alone are an empty reply, a failure to `verifiers`."""
LIKED = {END: 1.15, **dict.fromkeys("0123", 1.0)}
CALLING = {CALLS["add"]: 1.0, CALLS["fail"]: 0.9}
SILENT = dict.fromkeys(CALLS.values(), -2.0)


@dataclass(frozen=True)
class Turn:
    """What was told before a reply, and the reply, as text without marks."""

    told: str
    reply: str


@dataclass(frozen=True)
class Engine:
    """Its settings, for how many steps it is trained, and which versions are saved of that.

    What it plays with has so many layers.
    """

    settings: tuple[str, ...] = ()
    steps: int = 2
    saved: range = range(0)
    num_layers: int = 1


_SWITCHING = (
    "rollout.engine.kind=vllm",
    "rollout.engine.kv=recompute",
    "rollout.engine.dtype=float32",
    "rollout.engine.context_length=256",
    # new weights find turns under way in some of the steps, however slow the trainer is: steps are
    # admitted before they come
    "staleness.depth=2",
    "staleness.bound=4",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=100",
    "learner.optimizer.lr=3e-3",
    "learner.optimizer.schedule.num_warmup_steps=0",
)
ENGINES = {
    "transformers": Engine(),
    "vllm": Engine(_SWITCHING, steps=8, saved=range(1, 9)),
    "vllm-tp2": Engine(
        (*_SWITCHING, "rollout.engine.tensor_parallel=2"), steps=8, saved=range(1, 9)
    ),
    "vllm-pp2": Engine(
        (*_SWITCHING, "rollout.engine.pipeline_parallel=2"),
        steps=8,
        saved=range(1, 9),
        num_layers=2,
    ),
}


@dataclass(frozen=True)
class Environment:
    """A recipe, the setting that says what is played instead of what it has, and by what engine.

    Its turns may be so long that saved weights have to change within some, and it may bring tasks.
    """

    setting: str
    recipe: Path = SUMS
    engine: Engine = ENGINES["transformers"]
    has_long_turns: bool = False
    has_tasks: bool = False


def acting_model(path: Path, liked: Mapping[str, float], num_layers: int = 1) -> None:
    """Write a model whose output hardly depends on what it reads, but on what it likes.

    Args:
        path: where to.
        liked: how much it likes texts, each of which is a token.
        num_layers: of it.
    """
    config = TinyModelConfig(hidden_size=32, num_layers=num_layers, num_heads=2)
    letters = "abcdefghijklmnopqrstuvwxyzVE0123456789:,.?! '\n"
    build_tiny_model(path, [letters], config, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": [USER, TOOL, MODEL]})
    unknown = [text for text in liked if text not in tokenizer.get_vocab()]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in unknown])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        read, written = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        read[:, 0], read[:, 1], written[:, :2] = 1.0, 0.0, 0.0
        for token, much in liked.items():
            written[tokenizer.convert_tokens_to_ids(token), 0] = much
        read[tokenizer.convert_tokens_to_ids(MODEL), 1] = 1.0
        written[tokenizer.convert_tokens_to_ids(END), 1] = -3.0
    model.save_pretrained(path)


def played(
    runner: Runner, folder: Path, environment: Environment, calls: Mapping[str, float]
) -> tuple[Run, list[Trajectory]]:
    """Train some steps of a recipe in an environment; return all that was sampled for it."""
    acting_model(folder / "model", {**LIKED, **calls}, environment.engine.num_layers)
    rows = [{"prompt": f"go {word}", "answer": "1"} for word in ("on", "up", "in") * 8]
    (folder / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = runner.complete(
        *SMALL,
        *([] if environment.has_tasks else [f"data.path={folder / 'my.jsonl'}"]),
        f"model.path={folder / 'model'}",
        "validation={before=false, after=false}",
        "reward.rewards=[{kind='length', target=0, limit=32, weight=0.01}]",
        "rollout.record=true",
        "rollout.sampling.max_new_tokens=60",
        "rollout.episode.max_turns=4",
        f"trainer.steps={environment.engine.steps}",
        *environment.engine.settings,
        environment.setting,
        recipe=environment.recipe,
    )
    steps = environment.engine.steps
    assert run.report["steps"] == steps
    assert_balanced(run.report["books"])
    assert sum(run.report["failures"].values()) < _MOST_FAILED * steps
    assert run.report["mismatch"][0] < 1e-3, "the policy gives its tokens what the engine gave"
    (record,) = (run.output / "trajectories").glob("*.bin")
    return run, list(read_trajectories(record))


def turns_of(trajectory: Trajectory, tokenizer: AutoTokenizer) -> list[Turn]:
    """Take an episode apart by its marks; check that exactly the replies are trained on."""
    opens, ends = tokenizer.convert_tokens_to_ids([MODEL, END])
    turns: list[Turn] = []
    told: list[int] = []
    reply: list[int] | None = None
    sampled: list[bool] = []
    for token in trajectory.token_ids.tolist():
        sampled.append(reply is not None)
        if reply is None:
            told.append(token)
            if token == opens:
                reply = []
        else:
            reply.append(token)
            if token == ends:
                turns.append(
                    Turn(tokenizer.decode(told), tokenizer.decode(reply, skip_special_tokens=True))
                )
                told, reply = [], None
    if reply is not None:
        turns.append(
            Turn(tokenizer.decode(told), tokenizer.decode(reply, skip_special_tokens=True))
        )
    np.testing.assert_array_equal(trajectory.trainable, sampled)
    assert len(turns) == trajectory.metrics["turns"]
    return turns


def check_logprobs(
    trajectories: Sequence[Trajectory], models: Mapping[int, torch.nn.Module]
) -> None:
    """Compare those of versions that are known with forward passes of transformers."""
    compared = 0
    for trajectory in trajectories:
        if versions_of(trajectory) <= models.keys() and trajectory.metrics["turns"] > 1:
            own, _ = reference_logprobs(models, trajectory)
            recorded = trajectory.logprobs[trajectory.trainable]
            np.testing.assert_allclose(recorded, own.numpy(), atol=1e-4)
            compared += 1
    assert compared >= 4


def furthest_over_a_switch(
    trajectories: Sequence[Trajectory], models: Mapping[int, torch.nn.Module]
) -> float:
    """Return how far a turn's log-probs are from those of the weights it began with, at the most.

    A turn's tokens are next to one another, as none between them is trained on.
    """
    furthest = 0.0
    for trajectory in trajectories:
        versions, trained = trajectory.version_of_each_step(), trajectory.trainable
        if np.any(trained[1:] & trained[:-1] & (versions[1:] != versions[:-1])):
            _, stale = reference_logprobs(models, trajectory)
            recorded = trajectory.logprobs[trained]
            furthest = max(furthest, float(np.abs(recorded - stale.numpy()).max()))
    return furthest


def check(
    runner: Runner,
    folder: Path,
    environment: Environment,
    judge: Callable[[list[Turn]], Mapping[str, float]],
    calls: Mapping[str, float] = SILENT,
) -> list[list[Turn]]:
    """Run it; compare masks, log-probabilities and the environment's rewards; return the turns."""
    run, trajectories = played(runner, folder, environment, calls)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    engine = environment.engine
    assert len(trajectories) > engine.steps * (8 * 4 - _MOST_FAILED)
    models = {v: model_of_version(run, v, folder) for v in (0, *engine.saved)}
    check_logprobs(trajectories, models)
    if engine.saved and environment.has_long_turns:
        assert furthest_over_a_switch(trajectories, models) > 1e-2, "weights changed in no turn"
    episodes = [turns_of(trajectory, tokenizer) for trajectory in trajectories]
    for trajectory, turns in zip(trajectories, episodes, strict=True):
        earned = {name: much for name, much in trajectory.rewards.items() if name != "length"}
        assert earned == pytest.approx(judge(turns))
    assert max(map(len, episodes)) > 2
    return episodes
