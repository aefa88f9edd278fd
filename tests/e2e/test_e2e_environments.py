"""Whole runs with tools, in Gymnasium and in `verifiers`, judged by their tokens alone."""

import itertools
import json
import re
from pathlib import Path
from statistics import fmean

import pytest
from played_runs import (
    CALLING,
    CALLS,
    ENGINES,
    LIKED,
    MODEL,
    SILENT,
    TOOL,
    USER,
    Engine,
    Environment,
    Turn,
    acting_model,
    check,
)
from real_runs import SMALL, SUMS, Runner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAKE = SUMS.with_name("lake.toml")
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


@pytest.fixture(params=["transformers", "vllm"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """One that stands still with its weights for a step, and one whose weights change in turns."""
    if request.param.startswith("vllm"):
        pytest.importorskip("vllm")
    return ENGINES[request.param]


def test_a_run_trains_on_what_was_said_to_tools_and_not_on_what_they_answered(
    runner: Runner, tmp_path: Path, engine: Engine
) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    where = [f"{tmp_path / 'tools.py'}:{name}" for name in CALLS]
    setting = f"rollout.environment={{kind='tools', functions={where}}}"
    tools = Environment(setting, engine=engine)
    episodes = check(runner, tmp_path, tools, lambda _: {}, CALLING)
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


@pytest.mark.parametrize("engine", ["transformers", "vllm-tp2"], indirect=True)
def test_a_run_plays_an_environment_of_gymnasium_and_is_paid_by_it(
    runner: Runner, tmp_path: Path, engine: Engine
) -> None:
    """A lake of one row: 2 goes right, 0 left, 1 and 3 nowhere, and the end of it is worth 1."""
    pytest.importorskip("gymnasium")

    def judge(turns: list[Turn]) -> dict[str, float]:
        place, move = 0, -1.0
        for turn in turns:
            assert place < 2, "it goes on behind the end"
            expected = str(place) + MODEL if move in {0, 1, 2, 3} else "error: expected "
            assert turn is turns[0] or turn.told.startswith(USER + expected)
            move = float(([-1.0, *re.findall(r"\d+\.?\d*|\.\d+", turn.reply)])[-1])
            place = min(2, place + 1) if move == 2 else max(0, place - (move == 0))
        return {"environment": float(place == 2)}

    lake = Environment("rollout.environment.settings.desc=['SFG']", LAKE, engine)
    episodes = check(runner, tmp_path, lake, judge)
    assert all(turns[0].told.endswith(f"\n0{MODEL}") for turns in episodes)


@pytest.mark.parametrize("engine", ["transformers", "vllm-pp2"], indirect=True)
def test_a_run_plays_an_environment_of_verifiers_and_is_paid_by_its_rubric(
    runner: Runner, tmp_path: Path, engine: Engine
) -> None:
    pytest.importorskip("verifiers")
    (tmp_path / "guess.py").write_text(GUESS)
    where = f"{tmp_path / 'guess.py'}:load_environment"
    setting = f"rollout.environment={{kind='verifiers', id='{where}'}}"
    guess = Environment(setting, engine=engine, has_long_turns=True)

    def judge(turns: list[Turn]) -> dict[str, float]:
        return {"environment": float(turns[-1].reply == "1") + 0.1 * len(turns)}

    episodes = check(runner, tmp_path, guess, judge)
    for turns in episodes:
        assert {turn.told for turn in turns[1:]} <= {f"{USER}no, again{MODEL}"}
        assert all(turn.reply != "1" for turn in turns[:-1])


def test_a_model_learns_to_cross_a_lake(runner: Runner, tmp_path: Path) -> None:
    """Two moves to the right in at most three turns; at first it rarely says a 2."""
    pytest.importorskip("gymnasium")
    acting_model(tmp_path / "model", {**LIKED, **SILENT})
    (tmp_path / "lake.jsonl").write_text(json.dumps({"prompt": "go on"}) + "\n")
    run = runner.complete(
        *SMALL,
        f"model.path={tmp_path / 'model'}",
        f"data.path={tmp_path / 'lake.jsonl'}",
        "rollout.environment.settings.desc=['SFG']",
        "rollout.episode.max_turns=3",
        "rollout.sampling.max_new_tokens=12",
        "trainer.steps=30",
        "trainer.samples_per_group=8",
        "learner.optimizer.lr=0.003",
        "reward.rewards=[{kind='length', target=0, limit=32, weight=0.0}]",
        recipe=LAKE,
    )
    rewards = run.report["rewards"]
    first, last = fmean(rewards[:10]), fmean(rewards[-10:])
    assert last > first + 0.3, rewards
    assert 0.0 <= min(rewards) <= max(rewards) <= 1.0, "of the lake alone"
