"""Whole runs with tools, in Gymnasium and in `verifiers`, judged by their tokens alone.

The model is a random one that likes some tokens: digits, calls of two tools, and the end of a turn,
which it does not begin with.
What is trained on has to be what it sampled, with the log-probabilities that it gave, and the rest
what the environment said: worked out here from the tokens. In vLLM new weights arrive in the midst
of turns, and each token has the log-probability of those that sampled it.
"""

import itertools
import json
import re
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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
LAKE = SUMS.with_name("lake.toml")
_MOST_FAILED = 3
"""So many samples of each step: marks alone are an empty reply, a failure to `verifiers`."""
LIKED = {END: 1.15, **dict.fromkeys("0123", 1.0)}
CALLING = {CALLS["add"]: 1.0, CALLS["fail"]: 0.9}
SILENT = dict.fromkeys(CALLS.values(), -2.0)
TOOLS = '''
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one
        b: other
    """
    return a + b

async def fail(a: int, b: int) -> int:
    """Fail.

    Args:
        a: one
        b: other
    """
    raise ValueError("no")
'''
GUESS = """
import verifiers as vf
from datasets import Dataset

def right(completion, answer):
    return float(completion[-1]["content"] == answer)

def asked(state):
    return float(len(state["trajectory"]))

class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "no, again"}]

    @vf.stop
    async def is_right(self, state):
        steps = state["trajectory"]
        return bool(steps) and steps[-1]["completion"][-1]["content"] == state["answer"]

def load_environment():
    rows = Dataset.from_list([{"question": "?", "answer": "1"}])
    return Guess(dataset=rows, rubric=vf.Rubric([right, asked], [1.0, 0.1]), max_turns=4)
"""


@dataclass(frozen=True)
class Turn:
    """What was told before a reply, and the reply, as text without marks."""

    told: str
    reply: str


@dataclass(frozen=True)
class Engine:
    """Its settings, for how many steps it is trained, and which versions are saved of that."""

    settings: tuple[str, ...] = ()
    steps: int = 2
    saved: range = range(0)


ENGINES = {
    "transformers": Engine(),
    "vllm": Engine(
        (
            "rollout.engine.kind=vllm",
            "rollout.engine.kv=recompute",
            # new weights find turns under way, however slow the trainer is: their step is admitted
            # before they come
            "staleness.depth=2",
            "staleness.bound=4",
            "trainer.checkpoint_every=1",
            "trainer.keep_checkpoints=100",
            "learner.optimizer.lr=3e-3",
            "learner.optimizer.schedule.num_warmup_steps=0",
        ),
        steps=4,
        saved=range(1, 5),
    ),
}


@dataclass(frozen=True)
class Environment:
    """A recipe, the setting that says what is played instead of what it has, and by what engine.

    Its turns may be so long that saved weights have to change within some.
    """

    setting: str
    recipe: Path = SUMS
    engine: Engine = ENGINES["transformers"]
    has_long_turns: bool = False


@pytest.fixture(params=["transformers", "vllm"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """One that stands still with its weights for a step, and one whose weights change in turns."""
    if request.param == "vllm":
        pytest.importorskip("vllm")
    return ENGINES[request.param]


def acting_model(path: Path, liked: Mapping[str, float]) -> None:
    """Write a model whose output hardly depends on what it reads, but on what it likes."""
    config = TinyModelConfig(hidden_size=32, num_layers=1, num_heads=2)
    letters = "abcdefghijklmnopqrstuvwxyzVE0123456789:,.?! '\n"
    build_tiny_model(path, [letters], config, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": [USER, TOOL, MODEL]})
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in CALLS.values()])
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
    acting_model(folder / "model", {**LIKED, **calls})
    rows = [{"prompt": f"go {word}", "answer": "1"} for word in ("on", "up", "in") * 8]
    (folder / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = runner.complete(
        *SMALL,
        f"data.path={folder / 'my.jsonl'}",
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
    judge: Callable[[list[Turn]], float],
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
        assert trajectory.rewards.get("environment", 0.0) == pytest.approx(judge(turns))
    assert max(map(len, episodes)) > 2
    return episodes


def test_a_run_trains_on_what_was_said_to_tools_and_not_on_what_they_answered(
    runner: Runner, tmp_path: Path, engine: Engine
) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    where = [f"{tmp_path / 'tools.py'}:{name}" for name in CALLS]
    setting = f"rollout.environment={{kind='tools', functions={where}}}"
    tools = Environment(setting, engine=engine)
    episodes = check(runner, tmp_path, tools, lambda _: 0.0, CALLING)
    answered = 0
    for turns in episodes:
        for before, after in itertools.pairwise(turns):
            asked = [name for name, call in CALLS.items() for _ in range(before.reply.count(call))]
            order = sorted(CALLS, key=before.reply.find)
            answers = {"add": f"{TOOL}5", "fail": f"{TOOL}error: ValueError: no"}
            assert asked, "who calls nothing is not answered"
            if len(set(asked)) == len(asked):
                said = [answers[name] for name in order if name in asked]
                assert after.told == "".join(said) + MODEL
                answered += 1
    assert answered > 10


def test_a_run_plays_an_environment_of_gymnasium_and_is_paid_by_it(
    runner: Runner, tmp_path: Path
) -> None:
    """A lake of one row: 2 goes right, 0 left, 1 and 3 nowhere, and the end of it is worth 1."""
    pytest.importorskip("gymnasium")

    def judge(turns: list[Turn]) -> float:
        place, move = 0, -1.0
        for turn in turns:
            assert place < 2, "it goes on behind the end"
            expected = str(place) + MODEL if move in {0, 1, 2, 3} else "error: expected "
            assert turn is turns[0] or turn.told.startswith(USER + expected)
            move = float(([-1.0, *re.findall(r"\d+\.?\d*|\.\d+", turn.reply)])[-1])
            place = min(2, place + 1) if move == 2 else max(0, place - (move == 0))
        return float(place == 2)

    lake = Environment("rollout.environment.settings.desc=['SFG']", LAKE)
    episodes = check(runner, tmp_path, lake, judge)
    assert all(turns[0].told.endswith(f"\n0{MODEL}") for turns in episodes)


def test_a_run_plays_an_environment_of_verifiers_and_is_paid_by_its_rubric(
    runner: Runner, tmp_path: Path, engine: Engine
) -> None:
    pytest.importorskip("verifiers")
    (tmp_path / "guess.py").write_text(GUESS)
    where = f"{tmp_path / 'guess.py'}:load_environment"
    setting = f"rollout.environment={{kind='verifiers', id='{where}'}}"
    guess = Environment(setting, engine=engine, has_long_turns=True)

    judge = lambda turns: float(turns[-1].reply == "1") + 0.1 * len(turns)  # noqa: E731
    episodes = check(runner, tmp_path, guess, judge)
    for turns in episodes:
        assert {turn.told for turn in turns[1:]} <= {f"{USER}no, again{MODEL}"}
        assert all(turn.reply != "1" for turn in turns[:-1])
