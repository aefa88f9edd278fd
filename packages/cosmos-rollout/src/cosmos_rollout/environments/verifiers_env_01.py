"""Environments of `verifiers` 0.1.10: objects that roll out with a client, and have a rubric."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from cosmos_rollout.environments.environment import Chat, InformedChat, opening
from cosmos_rollout.environments.transcript import Transcript
from cosmos_rollout.episode import Message
from cosmos_rollout.errors import EpisodeError, UserCodeError
from cosmos_rollout.prompts import PromptRow, prompt_row
from cosmos_rollout.user_code import load_callable, words_of


def load(name: str, settings: Mapping[str, Any]) -> "VerifiersEnvironment":
    """Load an installed environment, or call the function that loads it.

    Raises:
        UserCodeError: if it is not there, or cannot be played.
    """
    try:
        if ":" in name:
            return VerifiersEnvironment(load_callable(name)(**settings))
        import verifiers

        return VerifiersEnvironment(verifiers.load_environment(name, **settings))
    except (ImportError, ValueError, RuntimeError) as error:
        raise UserCodeError(f"environment {name} cannot be loaded: {error}") from error


class VerifiersEnvironment:
    """An `Environment` over one of `verifiers`; its reward is what the rubric says.

    Group rewards of its rubric need all siblings in one place, and are refused.

    Args:
        env: a `verifiers.Environment` that can roll out.

    Raises:
        UserCodeError: if it is another object, of a `verifiers` with another interface, or rewards
            groups.
    """

    def __init__(self, env: Any) -> None:
        missing = [name for name in ("oai_tools", "rollout", "rubric") if not hasattr(env, name)]
        if missing:  # from 0.1.11 on tools and clients are of the library's own kinds
            raise UserCodeError(
                f"{type(env).__name__} is no environment of verifiers 0.1.10, whose interface this "
                f"is for: it has no {', '.join(missing)}"
            )
        if grouped := _group_rewards(env.rubric):
            raise UserCodeError(
                f"{type(env).__name__} rewards whole groups ({', '.join(grouped)}), and an episode "
                "is scored alone; name such functions by reward.group_rewards"
            )
        self._env = env

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:
        """Tools as the environment describes them."""
        return tuple(self._env.oai_tools or ())

    def rows(self) -> list[PromptRow]:
        """Return the environment's own data set as prompts.

        Raises:
            UserCodeError: if it has none.
            PromptDataError: if a row of it is no prompt.
        """
        try:
            rows = self._env.get_dataset()
        except Exception as error:
            words = f"{type(self._env).__name__} has no data set: {words_of(error)}"
            raise UserCodeError(words) from error
        return [
            prompt_row(_plain(row), f"row {number}", default_id=str(number))
            for number, row in enumerate(rows)
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
        if isinstance(chat, InformedChat):
            chat.note(state.get("metrics") or {})
        return {"environment": float(state["reward"])}

    async def aclose(self) -> None:
        """Do nothing: the library tears down when the process ends."""


class _Client:
    """As much of an OpenAI client as `verifiers` uses."""

    def __init__(self, chat: Chat) -> None:
        self._transcript = Transcript(chat)
        completions = SimpleNamespace(create=self.create)
        self.namespace = SimpleNamespace(chat=SimpleNamespace(completions=completions))

    async def create(self, *, messages: Sequence[Message], **others: Any) -> Any:
        """Answer; model, tools and sampling are not the environment's to choose."""
        from openai.types.chat import ChatCompletion

        del others
        if self._transcript.is_over:
            raise _context_is_full()
        return ChatCompletion.model_validate(await self._transcript.completion(messages))


def _context_is_full() -> Exception:
    """Return the error by which `verifiers` knows that an episode is at its end."""
    import httpx
    from openai import BadRequestError

    words = "maximum context length is reached"
    request = httpx.Request("POST", "http://engine/chat/completions")
    response: Any = httpx.Response(400, text=words, request=request)  # of httpx or httpx2
    return BadRequestError(words, response=response, body=None)


def _group_rewards(rubric: Any) -> list[str]:
    """Return the names of functions that score a whole group, of all parts of a rubric."""
    named = getattr(rubric, "_get_group_reward_func_names", None)
    found: list[str] = [] if named is None else list(named())
    for part in getattr(rubric, "rubrics", ()):
        found += _group_rewards(part)
    return found


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:  # from a data set
    """Return a row with its prompt under the name that `prompt_row` expects."""
    plain = {key: value for key, value in row.items() if value is not None}
    prompt = plain.pop("prompt")
    key = "prompt" if isinstance(prompt, str) else "messages"
    return {**plain, key: prompt, "id": str(plain.get("example_id", ""))}
