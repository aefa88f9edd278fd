"""A conversation that is told whole each time, as OpenAI's chat completions want it."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cosmos_core.media import text_of
from cosmos_rollout.environments.environment import Chat, InformedChat, Reply
from cosmos_rollout.episode import Message
from cosmos_rollout.errors import EpisodeError


class Transcript:
    """Says what is new in each telling of a conversation to a chat.

    So every turn is recorded token by token, though whoever drives the conversation sees texts.

    Args:
        chat: that answers.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._known: list[tuple[str, str]] = []
        self._tools: list[Any] = []
        self._last: Reply | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be said: a limit was reached."""
        return self._last is not None and self._last.is_last

    def show(self, tools: Sequence[Mapping[str, object]]) -> None:
        """Have the model see these tools, if it has not been shown them.

        Raises:
            EpisodeError: if it was shown others and has answered, or the chat cannot be told.
        """
        if list(tools) == self._tools:
            return
        if self._known or not isinstance(self._chat, InformedChat):
            raise EpisodeError("the environment changed its tools in the midst of a conversation")
        self._chat.show(tools)
        self._tools = list(tools)

    async def completion(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Return the answer to a conversation, as a chat completion.

        Raises:
            EpisodeError: if it does not begin with the one before and its answer.
        """
        known = len(self._known)
        if [_essence(message) for message in messages[:known]] != self._known:
            raise EpisodeError("the environment rewrote what had been said")
        self._last = await self._chat.reply(messages[known:])
        completion = _completion(self._last)
        said = completion["choices"][0]["message"]
        self._known = [_essence(message) for message in (*messages, said)]
        return completion


def _essence(message: Message) -> tuple[str, str]:
    return str(message.get("role")), text_of(message.get("content"))


def _completion(reply: Reply) -> dict[str, Any]:
    calls = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in reply.calls
        if not call.problem
    ]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.content if calls else reply.text,
    }
    if calls:
        message["tool_calls"] = calls
    reason = "tool_calls" if calls else reply.finish_reason
    return {
        "id": "cosmos",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "cosmos",
        "choices": [{"index": 0, "finish_reason": reason, "message": message}],
    }
