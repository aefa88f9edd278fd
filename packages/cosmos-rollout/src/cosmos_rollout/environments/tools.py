"""An environment in which the model calls functions and reads what they return.

The model asks once or several times in a reply, in the format of its chat template (see
`EpisodeLimits`); as Qwen's and Hermes' have it::

    <tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>

Each is answered by a message of role "tool". A tool that raises, takes too long or is not there is
answered by words that say so: that too is something a model can learn from.
"""

import asyncio
import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

from pebble import ProcessExpired

from cosmos_rollout.environments.environment import Chat, TimedChat, opening
from cosmos_rollout.environments.tool_calls import ToolCall
from cosmos_rollout.environments.tool_loop import ToolLoop
from cosmos_rollout.episode import Message
from cosmos_rollout.errors import UserCodeError
from cosmos_rollout.lasting_pool import LastingPool
from cosmos_rollout.prompts import PromptRow
from cosmos_rollout.user_code import check_reference, is_cancelled, load_callable, words_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolEnvironmentConfig:
    """Functions that the model may call.

    A function is described to the model by its signature and its docstring, in Google's style; its
    result is shown as text. A plain one runs in a worker process, which is killed when it takes
    too long; an ``async def`` runs in an event loop that such tools share, in a thread of its own,
    and is cancelled. One that blocks that thread is given up: it goes on there, as nothing ends it.

    Attributes:
        kind: selects this environment.
        functions: each ``module:function``, or ``path/to/file.py:function``.
        timeout_s: seconds that a call may take.
        num_workers: processes that run plain functions.
        memory_mib: data memory of such a process; 0: no limit.
        result_chars: a longer result is cut.
    """

    kind: Literal["tools"] = "tools"
    functions: tuple[str, ...]
    timeout_s: float = 10.0
    num_workers: int = 1
    memory_mib: int = 1024
    result_chars: int = 4096

    def __post_init__(self) -> None:
        names = [check_reference(function) for function in self.functions]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"tools need distinct names, at least one, found {names}")
        if not 0.0 < self.timeout_s < math.inf or self.num_workers < 1:
            raise ValueError("timeout_s and num_workers have to be positive and finite")
        if self.memory_mib < 0 or self.result_chars < 0:
            raise ValueError("memory_mib and result_chars have to be 0 or more")

    def build(self) -> "ToolEnvironment":
        """Import the functions.

        Raises:
            UserCodeError: if one is not there, or does not say what its arguments are.
        """
        return ToolEnvironment(self)


class ToolEnvironment:
    """An `Environment` of tools; it gives no reward of its own."""

    def __init__(self, config: ToolEnvironmentConfig) -> None:
        self._config = config
        self._references = {check_reference(where): where for where in config.functions}
        self._functions = {name: load_callable(at) for name, at in self._references.items()}
        self._tools = tuple(describe(function) for function in self._functions.values())
        self._workers = LastingPool(
            config.num_workers, memory_mib=config.memory_mib, preload=[__name__]
        )
        self._loop = ToolLoop()

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:
        """The functions as JSON schemas."""
        return self._tools

    async def play(self, row: PromptRow, chat: Chat, seed: int) -> Mapping[str, float]:
        """Answer calls until the model makes none."""
        del seed  # tools know no chance
        messages: Sequence[Message] = opening(row)
        while True:
            reply = await chat.reply(messages)
            if reply.is_last or not reply.calls:
                return {}
            timed = chat if isinstance(chat, TimedChat) else None
            messages = await asyncio.gather(*(self._answer(call, timed) for call in reply.calls))

    async def aclose(self) -> None:
        """End the worker processes and the thread. Idempotent."""
        self._loop.close()
        await self._workers.aclose()

    async def _answer(self, call: ToolCall, timed: TimedChat | None) -> Message:
        try:
            content = call.problem or await self._run(call, timed)
        except TimeoutError:
            content = f"error: {call.name} took longer than {self._config.timeout_s} s"
        except ProcessExpired as error:
            content = f"error: {call.name} ended its process (exit code {error.exitcode})"
        except Exception as error:  # noqa: BLE001 - the model gets to read it
            content = _told(error)
        limit = self._config.result_chars
        content = content if len(content) <= limit else f"{content[:limit]} ... (cut)"
        shown = {"tool_call_id": call.call_id, "name": call.name, "content": content}
        return {"role": "tool", **shown}

    async def _run(self, call: ToolCall, timed: TimedChat | None) -> str:
        function = self._functions.get(call.name)
        if function is None:
            names = ", ".join(self._functions)
            return f"error: there is no tool {call.name!r}; there are {names}"
        if inspect.iscoroutinefunction(function):
            called = _call_here(function, call.arguments)
            return await self._loop.run(called, self._config.timeout_s)
        where, arguments = self._references[call.name], dict(call.arguments)
        asked = (where, arguments, self._config.result_chars + 1)  # one more: it is cut here
        # who waits for a worker waits for the calls of other episodes, which have a limit each
        with timed.uncounted() if timed is not None else contextlib.nullcontext():
            return await self._workers.run(call_in_worker, asked, self._config.timeout_s)


def describe(function: Callable[..., Any]) -> Mapping[str, object]:
    """Return a function's JSON schema, from its signature and docstring.

    Raises:
        UserCodeError: if these do not say what the arguments are.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        return cast(Mapping[str, object], get_json_schema(function))
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise UserCodeError(f"tool {getattr(function, '__name__', function)}: {error}") from error


def call_in_worker(reference: str, arguments: dict[str, Any], limit: int) -> str:
    """Call a function; runs in a worker process, which imports it once.

    Whatever it raises is told in words: an exit or an interrupt would end who asked. No more than
    ``limit`` characters leave the process: copies of a whole file would take all its memory.
    """
    try:
        return str(_loaded(reference)(**arguments))[:limit]
    except BaseException as error:  # noqa: BLE001 - the model gets to read it
        return _told(error)[:limit]


async def _call_here(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    try:
        return str(await function(**arguments))
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        return _told(error)  # of a task of its own
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - as below
        return _told(error)


def _told(error: BaseException) -> str:
    return f"error: {type(error).__name__}: {words_of(error)}"


@lru_cache
def _loaded(reference: str) -> Callable[..., Any]:
    return load_callable(reference)
