"""Environments of `verifiers` 0.1.10, the real library, played by a list of replies."""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import pytest
from capabilities import skip_without

pytest.importorskip("verifiers")
pytest.importorskip("datasets")
if version("verifiers") != "0.1.10":
    skip_without("packages", "of verifiers, 0.1.10")

from cosmos_rollout import (
    EpisodeError,
    Message,
    Reply,
    UserCodeError,
    VerifiersEnvironmentConfig,
)
from cosmos_rollout.environments.tool_calls import read_reply

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ENVIRONMENTS = '''
import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([
    {"question": "2+2?", "answer": "4"},
    {"question": "3+3?", "answer": "6"},
])

def right(completion, answer):
    return float(completion[-1]["content"] == answer)

def asked(state):
    return float(len(state["trajectory"]))

def ranks(completions):
    return [0.0 for _ in completions]

class Guess(vf.MultiTurnEnv):
    """Asks again until the answer is right."""

    async def env_response(self, messages, state, **kwargs):
        if messages[-1]["content"] == "break":
            raise vf.InfraError("the sandbox is gone")
        return [{"role": "user", "content": "no, again"}]

    @vf.stop
    async def is_right(self, state):
        steps = state["trajectory"]
        return bool(steps) and steps[-1]["completion"][-1]["content"] == state["answer"]

class Rewrites(Guess):
    async def get_prompt_messages(self, state):
        return [{"role": "user", "content": str(len(state["trajectory"]))}]

def guess(max_turns=4):
    return Guess(dataset=ROWS, rubric=vf.Rubric([right, asked], [1.0, 0.1]), max_turns=max_turns)

def rewrites():
    return Rewrites(dataset=ROWS, rubric=vf.Rubric([right]))

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b

def tools():
    return vf.ToolEnv(dataset=ROWS, tools=[add], rubric=vf.Rubric([right]))

def grouped():
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric([ranks]))

def grouped_in_part():
    parts = [vf.Rubric([right]), vf.Rubric([ranks])]
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.RubricGroup(parts))
'''


class Player:
    """A chat that says what a list has, and keeps what it was told."""

    def __init__(self, *replies: str) -> None:
        self._replies = list(replies)
        self.told: list[list[Message]] = []

    async def reply(self, messages: Sequence[Message]) -> Reply:
        self.told.append(list(messages))
        text = self._replies.pop(0)
        return Reply(
            text=text,
            calls=read_reply(text).calls,
            finish_reason="stop",
            is_last=not self._replies,
        )


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    path = tmp_path_factory.mktemp("verifiers") / "mine.py"
    path.write_text(ENVIRONMENTS)

    def build(name: str, **settings):
        return VerifiersEnvironmentConfig(id=f"{path}:{name}", settings=settings).build()

    return build


async def test_the_environment_asks_until_it_is_content_and_its_rubric_rewards(load):
    environment = load("guess")
    row = environment.rows()[0]
    assert (row.answer, row.messages) == ("4", ({"role": "user", "content": "2+2?"},))
    player = Player("5", "3", "4", "never said")
    assert await environment.play(row, player, 0) == {"environment": pytest.approx(1.3)}
    again = [{"role": "user", "content": "no, again"}]  # only what is new, each time
    assert player.told == [[{"role": "user", "content": "2+2?"}], again, again]


async def test_its_own_limit_of_turns_holds(load):
    environment = load("guess", max_turns=2)
    player = Player("1", "2", "4")
    found = await environment.play(environment.rows()[1], player, 0)
    assert found == {"environment": pytest.approx(0.2)}


async def test_our_limit_ends_an_episode_with_what_it_earned(load):
    environment = load("guess")
    found = await environment.play(environment.rows()[0], Player("5", "5"), 0)
    assert found == {"environment": pytest.approx(0.2)}


async def test_its_tools_are_shown_and_called(load):
    environment = load("tools")
    (tool,) = environment.tools
    assert tool["function"]["name"] == "add"
    asked = json.dumps({"name": "add", "arguments": {"a": 2, "b": 2}})
    player = Player(f"<tool_call>{asked}</tool_call>", "4", "never said")
    assert await environment.play(environment.rows()[0], player, 0) == {"environment": 1.0}
    (observation,) = player.told[1]
    assert (observation["role"], observation["content"]) == ("tool", "4")


async def test_an_error_of_its_is_a_failed_episode_and_not_a_zero(load):
    environment = load("guess")
    with pytest.raises(EpisodeError, match="the sandbox is gone"):
        await environment.play(environment.rows()[0], Player("break", "4", "x"), 0)


async def test_a_conversation_that_it_rewrites_cannot_be_recorded(load):
    environment = load("rewrites")
    with pytest.raises(EpisodeError):
        await environment.play(environment.rows()[0], Player("5", "4", "x"), 0)


@pytest.mark.parametrize("name", ["grouped", "grouped_in_part"])
def test_rewards_of_whole_groups_are_refused_at_the_start(load, name):
    with pytest.raises(UserCodeError, match=r"SingleTurnEnv rewards whole groups \(ranks\)"):
        load(name)


async def test_what_each_function_of_its_rubric_gave_is_noted(load):
    class Noting(Player):
        def note(self, metrics: Mapping[str, float]) -> None:
            self.noted = dict(metrics)

        def show(self, tools: Sequence[Mapping[str, object]]) -> None:
            raise AssertionError(tools)

    environment, player = load("guess"), Noting("5", "4", "never said")
    assert await environment.play(environment.rows()[0], player, 0) == {
        "environment": pytest.approx(1.2)
    }
    assert {name: player.noted[name] for name in ("right", "asked")} == {"right": 1.0, "asked": 2.0}


def test_an_environment_that_is_not_installed_is_known_at_the_start():
    with pytest.raises(UserCodeError, match="environment nowhere cannot be loaded"):
        VerifiersEnvironmentConfig(id="nowhere").build()


def test_an_environment_of_another_interface_is_refused_by_name(tmp_path):
    path = tmp_path / "later.py"
    path.write_text("class Env:\n    tool_defs = ()\n\ndef load():\n    return Env()\n")
    with pytest.raises(UserCodeError, match=r"Env is no .*verifiers 0\.1\.10.*no oai_tools"):
        VerifiersEnvironmentConfig(id=f"{path}:load").build()
