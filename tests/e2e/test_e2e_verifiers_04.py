"""Whole runs on tasks of `verifiers` 0.4, with its own servers, judged by their tokens alone.

Run by `scripts/check_verifiers.sh`, in an environment of its own.
"""

import itertools
import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from capabilities import skip_without

pytest.importorskip("verifiers")
if not version("verifiers").startswith("0.4."):
    skip_without("verifiers-0.4")

from played_runs import CALLING, CALLS, ENGINES, MODEL, TOOL, USER, Environment, Turn, check
from real_runs import Runner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAME = "calling-of-04"
AGENT = f"{{harness={{id='{NAME}'}}, runtime={{type='subprocess'}}}}"
SETTING = f"rollout.environment={{kind='verifiers', id='{NAME}', settings={{agent={AGENT}}}}}"
TASKS = '''
import json
from contextlib import AsyncExitStack

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

class Calls(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """Served by the library in a process of its own, to all episodes."""

    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add."""
        return str(a + b)

    @vf.tool
    async def fail(self, a: int, b: int) -> str:
        """Fail."""
        raise ValueError("no")

class WordData(vf.TaskData):
    answer: str

class WordTask(vf.Task[WordData]):
    @vf.reward
    async def right(self, trace):
        last = [message for message in trace.messages if message.role == "assistant"][-1]
        return float(last.content == self.data.answer and not last.tool_calls)

    @vf.reward(weight=0.1)
    async def asked(self, trace):
        return float(trace.num_turns)

class WordsConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()

class Words(vf.Taskset[WordTask, WordsConfig]):
    def load(self):
        for word in ("on", "up", "in") * 8:
            yield WordTask(WordData(prompt=f"go {word}", answer="1"), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Calls(config.tools)]

class Calling(vf.Harness[vf.HarnessConfig]):
    """Asks in this process until the answer is right, and has tools called where they are."""

    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with AsyncExitStack() as stack:
            tools, *where = await connect_mcp(servers, stack)
            client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
            await stack.enter_async_context(client)
            for _ in range(4):
                completion = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=tools
                )
                said = completion.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                calls = said.tool_calls or []
                if not calls and said.content == data.answer:
                    break
                for call in calls:
                    arguments = json.loads(call.function.arguments)
                    dispatch, found = where
                    told = await call_mcp(found, dispatch, call.function.name, arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
                if not calls:
                    messages.append({"role": "user", "content": "no, again"})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["Calling", "Words"]

if __name__ == "__main__":
    Calls.run()
'''
ANSWERS = {"add": "5", "fail": "Error executing tool fail: no"}


@pytest.fixture(scope="module", autouse=True)
def tasks(tmp_path_factory: pytest.TempPathFactory):
    """A taskset as installed packages have it: a module."""
    path = tmp_path_factory.mktemp("tasks")
    (path / f"{NAME.replace('-', '_')}.py").write_text(TASKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)
        yield


def judge(turns: list[Turn]) -> dict[str, float]:
    return {"right": float(turns[-1].reply == "1"), "asked": 0.1 * len(turns)}


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_run_trains_on_what_a_program_was_answered_and_on_nothing_it_said(
    engine: str, runner: Runner, tmp_path: Path
) -> None:
    """A program of several turns, with tools of a server of the library's."""
    environment = Environment(SETTING, engine=ENGINES[engine], has_tasks=True)
    answered = {"calls": 0, "words": 0}
    for turns in check(runner, tmp_path, environment, judge, CALLING):
        assert re.fullmatch(f"{USER}go (on|up|in){MODEL}", turns[0].told)
        for before, after in itertools.pairwise(turns):
            places = [
                (at.start(), name)
                for name in CALLS
                for at in re.finditer(re.escape(CALLS[name]), before.reply)
            ]
            told = "".join(f"{TOOL}{ANSWERS[name]}" for _, name in sorted(places))
            assert after.told == (told or f"{USER}no, again") + MODEL
            answered["calls" if told else "words"] += 1
    assert min(answered.values()) > 10
