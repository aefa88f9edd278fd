"""Environments of `verifiers` 0.4, by its own servers and runtimes, played by a list of replies."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import numpy as np
import pytest
from capabilities import skip_without

pytest.importorskip("verifiers")
if not version("verifiers").startswith("0.4."):
    skip_without("verifiers-0.4")

from spelling import TOKENIZER, play, says, spelled

from cosmos_rollout import EpisodeError, Message, Reply, UserCodeError, VerifiersEnvironmentConfig
from cosmos_rollout.environments.tool_calls import read_reply

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SUMS = '''
import json

import verifiers.v1 as vf
from openai import AsyncOpenAI

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace):
        if trace.messages[-1].content == "spoil":
            raise ValueError("the judge is out")
        return float(trace.messages[-1].content == self.data.answer)

    @vf.reward(weight=0.1)
    async def asked(self, trace):
        return float(trace.num_turns)

    @vf.metric
    async def letters(self, trace):
        return float(len(trace.messages[-1].content))

class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for asked, answer in (("2+2?", "4"), ("3+3?", "6")):
            data = SumData(prompt=asked, answer=answer, system_prompt="Add.")
            yield SumTask(data, self.config.task)

class AskingConfig(vf.HarnessConfig):
    most: int = 4
    stream: bool = True
    has_tools: bool = False
    rewrites: bool = False
    patient: bool = True

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

class Asking(vf.Harness[AskingConfig]):
    """Asks in this process until the answer is right."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(self.config.most):
                said = await self._ask(client, ctx.model, messages)
                if said["content"] == "break":
                    raise RuntimeError("the sandbox is gone")
                messages.append(said)
                if said["content"] == data.answer:
                    break
                calls = said.get("tool_calls") or []
                for call in calls:
                    total = sum(json.loads(call["function"]["arguments"]).values())
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": str(total)}
                    )
                if not calls:
                    messages.append({"role": "user", "content": "no, again"})
                if self.config.rewrites:
                    messages = messages[1:]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _ask(self, client, model, messages):
        tools = {"tools": [ADD]} if self.config.has_tools else {}
        if not self.config.stream:
            completion = await client.chat.completions.create(
                model=model, messages=messages, **tools
            )
            return completion.choices[0].message.model_dump(exclude_none=True)
        async with client.chat.completions.stream(
            model=model, messages=messages, **tools
        ) as stream:
            completion = await stream.get_final_completion()
        said = completion.choices[0].message.model_dump(exclude_none=True)
        return {key: said[key] for key in ("role", "content", "tool_calls") if key in said}

__all__ = ["Asking", "Sums"]
'''
ENDLESS = """
import verifiers.v1 as vf
from sums_of_04 import SumData, SumTask

class Endless(vf.Taskset[SumTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield SumTask(SumData(prompt="1+1?", answer="2"), self.config.task)

__all__ = ["Endless"]
"""
DUEL = """
import verifiers.v1 as vf
from sums_of_04 import Asking, Sums

class DuelConfig(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    other: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())

class Duel(vf.Env[DuelConfig]):
    async def run(self, task, agents):
        await agents.one.run(task)

__all__ = ["Asking", "Duel", "Sums"]
"""


class Player:
    """A chat that says what a list has, and keeps what it was told."""

    def __init__(self, *replies: str) -> None:
        self._replies = list(replies)
        self.told: list[list[Message]] = []
        self.tools: list[Mapping[str, object]] = []
        self.metrics: dict[str, float] = {}

    async def reply(self, messages: Sequence[Message]) -> Reply:
        self.told.append(list(messages))
        if not self._replies:
            await asyncio.Event().wait()
        text = self._replies.pop(0)
        return Reply(
            text=text,
            calls=read_reply(text).calls,
            finish_reason="stop",
            is_last=text.endswith("!"),
        )

    def show(self, tools: Sequence[Mapping[str, object]]) -> None:
        self.tools = list(tools)

    def note(self, metrics: Mapping[str, float]) -> None:
        self.metrics |= metrics


@pytest.fixture(scope="module", autouse=True)
def tasksets(tmp_path_factory):
    """Tasksets as installed packages have them: modules."""
    path = tmp_path_factory.mktemp("tasksets")
    for name, source in (("sums", SUMS), ("endless", ENDLESS), ("duel", DUEL)):
        (path / f"{name}_of_04.py").write_text(source)
    sys.path.insert(0, str(path))
    yield
    sys.path.remove(str(path))


def load(*, name: str = "sums-of-04", env: Mapping[str, object] | None = None, **harness: object):
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "sums-of-04", **harness}}
    return VerifiersEnvironmentConfig(id=name, settings={"agent": agent, **(env or {})}).build()


async def played(environment, player: Player, row: int = 0) -> Mapping[str, float]:
    try:
        return await environment.play(environment.rows()[row], player, 0)
    finally:
        await environment.aclose()


def test_its_tasks_are_rows_that_hold_them_whole():
    first, second = load().rows()
    assert first.messages == (
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "2+2?"},
    )
    assert (first.answer, second.answer) == ("4", "6")
    assert first.fields["task"]["system_prompt"] == "Add."
    assert first.prompt_id != second.prompt_id


@pytest.mark.parametrize("stream", [True, False])
async def test_a_program_asks_until_it_is_content_and_named_rewards_arrive(stream):
    player = Player("5", "3", "4", "never said")
    earned = await played(load(stream=stream), player)
    assert earned == {"right": 1.0, "asked": pytest.approx(0.3)}
    assert player.metrics == {"letters": 1.0}
    again = [{"role": "user", "content": "no, again"}]  # only what is new, each time
    opening = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]
    assert player.told == [opening, again, again]


async def test_the_tokens_of_every_turn_are_those_the_model_saw_and_said():
    episode = await play(load(), says("ab", "4"))
    between = "\n<|im_start|>user\nno, again<|im_end|>\n<|im_start|>assistant\n"
    parts = [
        (TOKENIZER.encode("<|im_start|>user\nab?<|im_end|>\n<|im_start|>assistant\n"), False),
        (spelled("ab"), True),  # "a", "b": the tokenizer would say "ab"
        (TOKENIZER.encode(between), False),
        (spelled("4"), True),
    ]
    assert episode.token_ids.tolist() == [token for tokens, _ in parts for token in tokens]
    assert episode.trainable.tolist() == [is_said for tokens, is_said in parts for _ in tokens]
    np.testing.assert_array_equal(episode.logprobs[episode.trainable], [-0.5] * 3 + [-1.5] * 2)
    assert episode.rewards == {"right": 1.0, "asked": pytest.approx(0.2)}
    assert episode.metrics == {"letters": 1.0}


async def test_the_model_sees_the_tools_that_a_program_names():
    episode = await play(load(has_tools=True, stream=False), says("4"))
    text = TOKENIZER.decode(episode.token_ids.tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\n[")
    assert '"name": "add"' in text


async def test_many_episodes_at_a_time_are_told_apart():
    environment = load()
    rows = environment.rows()
    players = [Player("1", "4"), Player("6"), Player(*"2356"), Player("6")]
    try:
        earned = await asyncio.gather(
            *(environment.play(rows[n % 2], player, 0) for n, player in enumerate(players))
        )
    finally:
        await environment.aclose()
    assert [each["right"] for each in earned] == [1.0, 1.0, 0.0, 1.0]
    assert [round(10 * each["asked"]) for each in earned] == [2, 1, 4, 1]


async def test_its_tools_are_shown_and_their_results_said():
    asked = json.dumps({"name": "add", "arguments": {"a": 2, "b": 2}})
    player = Player(f"<tool_call>{asked}</tool_call>", "4")
    earned = await played(load(has_tools=True, stream=False), player)
    assert earned["right"] == 1.0
    assert [tool["function"]["name"] for tool in player.tools] == ["add"]
    (observation,) = player.told[1]
    assert (observation["role"], observation["content"]) == ("tool", "4")


async def test_our_limit_ends_an_episode_with_what_it_earned():
    earned = await played(load(), Player("5", "5!"))
    assert earned == {"right": 0.0, "asked": pytest.approx(0.2)}


async def test_its_own_limit_of_turns_holds():
    assert (await played(load(most=1), Player("5", "4")))["right"] == 0.0


async def test_a_program_that_fails_is_a_failed_episode_and_not_a_zero():
    with pytest.raises(EpisodeError, match="the sandbox is gone"):
        await played(load(), Player("break"))


async def test_a_reward_that_raises_is_a_failed_episode():
    with pytest.raises(EpisodeError, match="the judge is out"):
        await played(load(most=1), Player("spoil"))


async def test_a_conversation_that_it_rewrites_cannot_be_recorded():
    with pytest.raises(EpisodeError, match="rewrote what had been said"):
        await played(load(rewrites=True), Player("5", "4"))


async def test_an_episode_that_is_cancelled_leaves_the_others_be():
    environment = load()
    row = environment.rows()[0]
    silent = asyncio.create_task(environment.play(row, Player(), 0))
    try:
        assert (await environment.play(row, Player("4"), 0))["right"] == 1.0
        silent.cancel()
        with pytest.raises(asyncio.CancelledError):
            await silent
        assert (await environment.play(row, Player("4"), 0))["right"] == 1.0
    finally:
        await environment.aclose()


async def test_two_runs_in_one_episode_are_refused():
    environment = load(env={"id": "best-of-n", "n": 2})
    with pytest.raises(EpisodeError, match=r"two runs of agents \(agent, agent\)"):
        await played(environment, Player("4", "4"))


def test_an_environment_of_two_agents_is_told_at_the_start_that_one_may_talk_to_the_model():
    with pytest.raises(UserCodeError, match=r"Duel has to have one agent .* it has one, other"):
        VerifiersEnvironmentConfig(id="duel-of-04").build()


async def test_the_others_may_have_models_of_their_own():
    elsewhere = {"type": "eval", "base_url": "http://localhost:1", "api_key_var": "NONE"}
    settings = {"other": {"client": elsewhere, "model": "m"}}
    environment = VerifiersEnvironmentConfig(id="duel-of-04", settings=settings).build()
    assert (await played(environment, Player("4")))["right"] == 1.0


def test_a_row_of_another_file_is_a_task_by_its_fields():
    environment = load()
    row = environment.rows()[0]
    other = type(row)(prompt_id="7", prompt="5+5?", answer="10", fields={"name": "ten"})
    task = environment._task(other)
    assert (task.data.prompt, task.data.answer, task.data.name) == ("5+5?", "10", "ten")


def test_tasks_without_end_are_refused():
    environment = load(name="endless-of-04")
    with pytest.raises(UserCodeError, match="Endless has tasks without end"):
        environment.rows()


def test_a_taskset_that_is_not_installed_is_known_at_the_start():
    with pytest.raises(UserCodeError, match="environment nowhere cannot be loaded"):
        VerifiersEnvironmentConfig(id="nowhere").build()


def test_an_environment_of_the_older_interface_is_refused_by_name(tmp_path):
    path = tmp_path / "older.py"
    path.write_text("class Env:\n    oai_tools = ()\n\ndef load():\n    return Env()\n")
    with pytest.raises(UserCodeError, match=r"Env is no environment of verifiers 0\.4"):
        VerifiersEnvironmentConfig(id=f"{path}:load").build()
