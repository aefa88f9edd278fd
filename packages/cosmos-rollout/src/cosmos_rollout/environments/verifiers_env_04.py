"""Environments of `verifiers` 0.4: tasks that programs work on, talking to a server of ours.

An environment has a taskset, and agents: programs (harnesses) with a place to run in. A program
asks the library's own server for chat completions, and that asks ours::

    program ─► library's server (records, checks limits) ─► `ChatEndpoint` ─► `Chat`

One sample is one conversation. So one agent talks to the model that is trained, once an episode; an
environment with more of them has to name the ``client`` of the others. Rewards are named, and their
weighted values are what the episode earned; no reward of 0.4 is of a whole group.
"""

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from cosmos_rollout.environments.chat_endpoint import ChatEndpoint
from cosmos_rollout.environments.environment import Chat, InformedChat
from cosmos_rollout.environments.transcript import Transcript
from cosmos_rollout.errors import EpisodeError, UserCodeError
from cosmos_rollout.prompts import PromptRow, prompt_row
from cosmos_rollout.user_code import load_callable, words_of

_NO_KEY = "COSMOS_CHAT_ENDPOINT_KEY"
_OUR_LIMIT = "limit_of_turns_or_tokens"


def load(name: str, settings: Mapping[str, Any]) -> "VerifiersTasks":
    """Load the environment of an installed taskset, or call the function that makes one.

    Raises:
        UserCodeError: if it is not there, or cannot be played.
    """
    try:
        if ":" in name:
            return VerifiersTasks(load_callable(name)(**settings))
        verifiers = importlib.import_module("verifiers.v1")
        taskset = {**settings.get("taskset", {}), "id": name}
        config = verifiers.resolve_env_config({**settings, "taskset": taskset})
        return VerifiersTasks(verifiers.load_environment(config))
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UserCodeError(f"environment {name} cannot be loaded: {error}") from error


class VerifiersTasks:
    """An `Environment` over one of `verifiers` 0.4.

    Args:
        env: a `verifiers.v1.Env`.

    Raises:
        UserCodeError: if it is another object, or more than one of its agents talk to our model.
    """

    def __init__(self, env: Any) -> None:
        verifiers = importlib.import_module("verifiers.v1")
        if not isinstance(env, verifiers.Env):
            raise UserCodeError(
                f"{type(env).__name__} is no environment of verifiers 0.4, which is installed: it "
                "is no verifiers.v1.Env (environments of 0.1 need verifiers 0.1.10)"
            )
        agents = {name: one for name, one in env.config if isinstance(one, verifiers.AgentConfig)}
        speakers = [name for name, agent in agents.items() if agent.client is None]
        if len(speakers) != 1:
            raise UserCodeError(
                f"{type(env).__name__} has to have one agent that talks to the model, for one "
                f"sample is one conversation; it has {', '.join(speakers) or 'none'}. Give all "
                "others a 'client' (and 'model') in its settings"
            )
        self._env = env
        self._verifiers = verifiers
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[ChatEndpoint] | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:
        """None: programs name their tools in what they ask."""
        return ()

    def rows(self) -> list[PromptRow]:
        """Return the tasks as prompts; each row has the whole task as its field ``task``.

        Raises:
            UserCodeError: if there is no end of them, or they cannot be loaded.
            PromptDataError: if a task is no prompt.
        """
        taskset = self._env.taskset
        if not taskset.bounded:
            raise UserCodeError(
                f"{type(taskset).__name__} has tasks without end; write some of them to a file, "
                "and name that"
            )
        try:
            tasks = list(taskset)
        except Exception as error:
            words = f"{type(taskset).__name__} has no tasks: {type(error).__name__}: "
            raise UserCodeError(words + words_of(error)) from error
        return [_row(task) for task in tasks]

    async def play(self, row: PromptRow, chat: Chat, seed: int) -> Mapping[str, float]:
        """Have the agent work on the row's task, and score what it did."""
        del seed  # the row says it all
        task = self._task(row)
        seat = _Seat(chat, await self._endpoint())
        try:
            episode = await self._env.run_episode(task, seat.context, on_trace=seat.admit)
        finally:
            seat.leave()
        trace = seat.trace_of(episode, is_complete=self._env.complete(episode))
        if trace is None:
            return {}
        if isinstance(chat, InformedChat):
            chat.note({name: n for name, n in trace.metrics.items() if n is not None})
        return {name: float(reward.value) for name, reward in trace.rewards.items()}

    async def aclose(self) -> None:
        """Stop the servers that episodes share."""
        self._closing.set()
        if self._serving is not None:
            await self._serving

    def _task(self, row: PromptRow) -> Any:  # a verifiers.v1.Task
        """Return a row as the task it was made of; one of another file by its fields."""
        prompt = row.prompt or [dict(message) for message in row.messages]
        told = row.fields.get("task")
        made = {**row.fields, "prompt": prompt, "answer": row.answer}
        kind = type(self._env.taskset).task_type()
        data = kind.data_type().model_validate(told if isinstance(told, Mapping) else made)
        return kind(data, self._env.config.taskset.task)

    async def _endpoint(self) -> ChatEndpoint:
        """Return what the library asks; the first episode starts it."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._ready))
        return await asyncio.shield(self._ready)

    async def _serve(self, ready: asyncio.Future[ChatEndpoint]) -> None:
        """Keep up what episodes share, in one task: what it is of has to end where it began."""
        try:
            async with ChatEndpoint() as endpoint, self._env.serving():
                ready.set_result(endpoint)
                await self._closing.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)


class _Seat:
    """One episode at the endpoint.

    Args:
        chat: that answers.
        endpoint: where the library asks.
    """

    def __init__(self, chat: Chat, endpoint: ChatEndpoint) -> None:
        self._transcript = Transcript(chat)
        self._endpoint = endpoint
        self._traces: dict[str, Any] = {}
        self._speaker = ""
        self._fault: Exception | None = None
        self._answering: set[asyncio.Task[Any]] = set()

    @property
    def context(self) -> Any:  # a verifiers.v1.ModelContext
        """Where the library finds the model."""
        verifiers = importlib.import_module("verifiers.v1")
        client = verifiers.EvalClientConfig(base_url=self._endpoint.url, api_key_var=_NO_KEY)
        return verifiers.ModelContext(model="cosmos", client=client)

    def admit(self, trace: Any) -> None:
        """Answer the requests of a run of an agent, which the library names by its trace."""
        self._traces[trace.id] = trace

        async def answer(body: Mapping[str, Any]) -> dict[str, Any]:
            return await self._answer(trace.id, body)

        self._endpoint.join(trace.id, answer)

    def leave(self) -> None:
        """Refuse further requests, and end what is being answered."""
        for session in self._traces:
            self._endpoint.leave(session)
        for task in self._answering:
            task.cancel()

    def trace_of(self, episode: Any, *, is_complete: bool) -> Any:  # a verifiers.v1.Trace, or None
        """Return the run that talked to the model; None if none did.

        Raises:
            EpisodeError: if something of the episode failed, or was not scored.
        """
        if self._fault is not None:
            raise self._fault
        trace = self._traces.get(self._speaker)
        if not is_complete or (trace is not None and not trace.ok):
            errors = [*episode.errors, *(e for one in episode.traces for e in one.errors)]
            words = f"{errors[0].type}: {errors[0].message}" if errors else "the episode failed"
            raise EpisodeError(f"verifiers: {words}"[:500])
        unscored = [] if trace is None else [n for n, r in trace.rewards.items() if r is None]
        if unscored:
            raise EpisodeError(f"verifiers: {', '.join(unscored)} did not score the episode")
        return trace

    async def _answer(self, session: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request; what goes wrong is kept, whatever the program makes of it."""
        if self._transcript.is_over and session == self._speaker:
            self._traces[session].stop(_OUR_LIMIT)  # an end like others, and no failure
            raise EpisodeError("maximum context length is reached")
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            return await self._say(session, body)
        except Exception as error:
            self._fault = self._fault or error
            if isinstance(error, EpisodeError):
                raise
            raise EpisodeError(words_of(error)) from error
        finally:
            self._answering.discard(task)

    async def _say(self, session: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self._speaker = self._speaker or session
        if session != self._speaker:
            names = (self._traces[one].agent.name for one in (self._speaker, session))
            raise EpisodeError(
                f"two runs of agents ({', '.join(names)}) talk to the model in one episode, and "
                "one sample is one conversation"
            )
        self._transcript.show(body.get("tools") or ())
        return await self._transcript.completion(body["messages"])


def _row(task: Any) -> PromptRow:
    """Return a task as a prompt. A task without one, whose user begins, is shown by its name."""
    data = task.data
    shown = data.prompt
    if shown is None:
        shown = data.description or data.name or task.key
    messages: list[Any] = []
    if data.system_prompt is not None:
        messages.append({"role": "system", "content": data.system_prompt})
    if isinstance(shown, str):
        messages.append({"role": "user", "content": shown})
    else:
        chat = importlib.import_module("verifiers.v1.dialects.chat")
        messages += [chat.message_to_wire(message) for message in shown]
    raw: dict[str, Any] = {
        "id": task.key,
        "messages": messages,
        "task": data.model_dump(mode="json", exclude_defaults=True),
    }
    answer = getattr(data, "answer", None)
    if isinstance(answer, str | int) and not isinstance(answer, bool):
        raw["answer"] = answer
    return prompt_row(raw, f"task {data.idx}", default_id=str(data.idx))
