"""An environment of the `verifiers` library, played with our engine.

Such an environment drives the conversation itself, through a client of OpenAI's chat completions.
It is given a client that says what is new to our `Chat`, so that its turns are recorded token by
token like those of any other environment. A conversation that it rewrites cannot be recorded so;
that episode fails. Group rewards of its rubric need all siblings in one place and are refused.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from cosmos_rollout.environments.environment import Chat, Reply, opening
from cosmos_rollout.episode import Message
from cosmos_rollout.errors import EpisodeError, UserCodeError
from cosmos_rollout.prompts import PromptRow, prompt_row
from cosmos_rollout.user_code import load_callable


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiersEnvironmentConfig:
    """An environment of the `verifiers` library.

    Attributes:
        kind: selects this environment.
        id: an installed environment, as `verifiers.load_environment` names it, or the function
            that loads it: ``module:load_environment``, ``path/to/file.py:load_environment``.
        settings: what the loading function is told.
    """

    kind: Literal["verifiers"] = "verifiers"
    id: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def build(self) -> "VerifiersEnvironment":
        """Load the environment.

        Raises:
            UserCodeError: if the library or the environment is not there.
        """
        return VerifiersEnvironment(self._load())

    def _load(self) -> Any:  # a verifiers.Environment
        try:
            if ":" in self.id:
                return load_callable(self.id)(**self.settings)
            import verifiers

            return verifiers.load_environment(self.id, **self.settings)
        except (ImportError, ValueError, RuntimeError) as error:
            raise UserCodeError(f"environment {self.id} cannot be loaded: {error}") from error


class VerifiersEnvironment:
    """An `Environment` over one of `verifiers`; its reward is what the rubric says.

    Args:
        env: a `verifiers.Environment` that can roll out.

    Raises:
        UserCodeError: if it is another object, or of a `verifiers` with another interface.
    """

    def __init__(self, env: Any) -> None:
        missing = [name for name in ("oai_tools", "rollout", "rubric") if not hasattr(env, name)]
        if missing:  # from 0.1.11 on tools and clients are of the library's own kinds
            raise UserCodeError(
                f"{type(env).__name__} is no environment of verifiers 0.1.10, whose interface this "
                f"is for: it has no {', '.join(missing)}"
            )
        self._env = env

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:
        """Tools as the environment describes them."""
        return tuple(self._env.oai_tools or ())

    def rows(self) -> list[PromptRow]:
        """Return the environment's own data set as prompts."""
        return [
            prompt_row(_plain(row), f"row {number}", default_id=str(number))
            for number, row in enumerate(self._env.get_dataset())
        ]

    async def play(self, row: PromptRow, chat: Chat, seed: int) -> Mapping[str, float]:
        """Roll out one row and score it."""
        del seed  # the row says it all
        client = _Client(chat)
        asked: dict[str, Any] = {
            **row.fields,
            "prompt": [dict(message) for message in opening(row)],
            "answer": row.answer or "",
            "example_id": row.prompt_id,
            "task": row.fields.get("task", self._env.env_id or "default"),
        }
        state = await self._env.rollout(asked, client.namespace, "cosmos", {})
        if state.get("error") is not None:
            raise EpisodeError(f"verifiers: {state['error']!r}")
        await self._env.rubric.score_rollout(state)
        return {"environment": float(state["reward"])}

    async def aclose(self) -> None:
        """Do nothing: the library tears down when the process ends."""


class _Client:
    """As much of an OpenAI client as `verifiers` uses."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._known: list[tuple[str, str]] = []
        self._last: Reply | None = None
        completions = SimpleNamespace(create=self.create)
        self.namespace = SimpleNamespace(chat=SimpleNamespace(completions=completions))

    async def create(self, *, messages: Sequence[Message], **others: Any) -> Any:
        """Answer; model, tools and sampling are not the environment's to choose."""
        del others
        if self._last is not None and self._last.is_last:
            raise _context_is_full()
        known = len(self._known)
        if [_essence(message) for message in messages[:known]] != self._known:
            raise EpisodeError("the environment rewrote what had been said")
        self._last = await self._chat.reply(messages[known:])
        completion = _completion(self._last)
        said = {"role": "assistant", "content": completion.choices[0].message.content}
        self._known = [_essence(message) for message in (*messages, said)]
        return completion


def _essence(message: Message) -> tuple[str, str]:
    return str(message.get("role")), str(message.get("content") or "")


def _completion(reply: Reply) -> Any:  # an openai.types.chat.ChatCompletion
    from openai.types.chat import ChatCompletion

    calls = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in reply.calls
        if not call.problem
    ]
    message = {
        "role": "assistant",
        "content": reply.content if calls else reply.text,
        "tool_calls": calls or None,
    }
    reason = "tool_calls" if calls else reply.finish_reason
    return ChatCompletion.model_validate(
        {
            "id": "cosmos",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "cosmos",
            "choices": [{"index": 0, "finish_reason": reason, "message": message}],
        }
    )


def _context_is_full() -> Exception:
    """Return the error by which `verifiers` knows that an episode is at its end."""
    import httpx
    from openai import BadRequestError

    words = "maximum context length is reached"
    request = httpx.Request("POST", "http://engine/chat/completions")
    response: Any = httpx.Response(400, text=words, request=request)  # of httpx or httpx2
    return BadRequestError(words, response=response, body=None)


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:  # from a data set
    """Return a row with its prompt under the name that `prompt_row` expects."""
    plain = {key: value for key, value in row.items() if value is not None}
    prompt = plain.pop("prompt")
    key = "prompt" if isinstance(prompt, str) else "messages"
    return {**plain, key: prompt, "id": str(plain.get("example_id", ""))}
