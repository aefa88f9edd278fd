"""What an environment is: it plays one episode with a model that it can talk to."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from cosmos_core.trajectory import FinishReason
from cosmos_rollout.environments.tool_calls import ToolCall
from cosmos_rollout.environments.tool_formats import ToolFormatName
from cosmos_rollout.episode import Message
from cosmos_rollout.prompts import PromptRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What the model said.

    Attributes:
        text: without special tokens.
        finish_reason: "stop", or "length" if a limit of tokens ended it.
        is_last: nothing can be said after it: a limit of turns or tokens is reached.
        calls: of tools, in order, as the model's format has them; a result is a message of role
            "tool" with the call's ``tool_call_id``. None are read of a reply that was cut.
        content: the text without calls and thoughts.
    """

    text: str
    finish_reason: FinishReason
    is_last: bool
    calls: tuple[ToolCall, ...] = ()
    content: str = ""


class Chat(Protocol):
    """A model to talk to, one turn after the other."""

    async def reply(self, messages: Sequence[Message]) -> Reply:
        """Say these messages, those that are new, and return what the model answers.

        A content is a text, or a list of ``{"type": "text", "text": ...}``, ``{"type": "image",
        "image": ...}`` and ``{"type": "video", "video": ...}``: an absolute path, a ``data:`` URL,
        the bytes of a file, a PIL image; a video may also be a list of pictures, its frames, with
        ``"sample_fps"`` beside it (`cosmos_core.media.with_media`).

        Raises:
            EpisodeError: after a reply that was the last, and for what is no picture or video.
        """
        ...


@runtime_checkable
class TimedChat(Chat, Protocol):
    """A chat that counts the environment's time, but for what has a limit of its own."""

    def uncounted(self) -> AbstractContextManager[None]:
        """Stop the environment's time in a ``with``; of several at a time the last starts it."""
        ...


@runtime_checkable
class InformedChat(Chat, Protocol):
    """A chat that is told what an environment finds out only while it plays."""

    def show(self, tools: Sequence[Mapping[str, object]]) -> None:
        """Have the chat template show these tools, in place of others, from the first message on.

        Raises:
            EpisodeError: once something was said.
        """
        ...

    def note(self, metrics: Mapping[str, float]) -> None:
        """Keep numbers of this episode by name, beside those that every sample has."""
        ...


class Environment(Protocol):
    """Plays episodes, many at a time, from one asyncio loop.

    Work that takes long belongs in a thread or a process: a blocked loop blocks every episode.
    """

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:
        """Descriptions of tools for the chat template, as JSON schemas; empty without any."""
        ...

    async def play(self, row: PromptRow, chat: Chat, seed: int) -> Mapping[str, float]:
        """Play one episode of a data row; return what it earned, by name.

        Raises:
            Exception: anything; it costs this sample, and no other.
        """
        ...

    async def aclose(self) -> None:
        """Let go of processes and the like. Idempotent."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeLimits:
    """What ends an episode that does not end by itself, and how calls of tools are read in it.

    Attributes:
        max_turns: the model speaks this often at most.
        timeout_s: seconds that the environment may take between two replies; the time that the
            model takes is not counted, nor that in which calls of tools wait for a worker process
            or have one. An episode that takes longer has failed.
        tool_format: how the model writes calls: "hermes", "llama3_json", "mistral", "qwen3_coder",
            "deepseek_v3", "harmony", "glm45", "kimi_k2"; "response_template": as the tokenizer
            states; "auto": as its chat template writes them, and Hermes' where it writes none.
    """

    max_turns: int = 8
    timeout_s: float = 60.0
    tool_format: ToolFormatName = "auto"

    def __post_init__(self) -> None:
        if self.max_turns < 1 or not 0.0 < self.timeout_s < math.inf:
            raise ValueError("max_turns and timeout_s have to be positive and finite")


def opening(row: PromptRow) -> tuple[Message, ...]:
    """Return a data row as the first messages of a conversation, pictures and videos in place."""
    if not row.images:
        return row.messages or ({"role": "user", "content": row.prompt},)
    images = iter(row.images)
    return tuple(
        {**message, "content": [_with_source(part, images) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in row.messages
    )


def _with_source(part: Mapping[str, Any], images: Iterator[str]) -> Mapping[str, Any]:
    return part if part["type"] == "text" else {**part, part["type"]: next(images)}
