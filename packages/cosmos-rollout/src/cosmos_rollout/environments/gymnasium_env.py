"""A Gymnasium environment as a conversation: observations are said, actions are read off replies.

The prompt of the data row is the instruction; the first observation follows it. A reply that names
no action is told so, and costs a turn. All siblings of a group begin in the same state. To a model
that sees, an observation may be what the environment renders.
"""

import asyncio
import io
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np

from cosmos_core.own_thread import OwnThread
from cosmos_rollout.environments.environment import Chat, opening
from cosmos_rollout.episode import Message
from cosmos_rollout.errors import UserCodeError
from cosmos_rollout.prompts import PromptRow
from cosmos_rollout.user_code import check_reference, load_callable

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_SEED_LIMIT = 1 << 31
_CLOSE_S = 5.0
_Content = str | Sequence[Mapping[str, Any]]
_Run = Callable[..., Awaitable[Any]]
"""Calls a function with arguments in the environment's thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GymnasiumEnvironmentConfig:
    """An environment of Gymnasium's registry.

    Attributes:
        kind: selects this environment.
        id: its name there, as in "FrozenLake-v1"; "module:name" imports the module first.
        settings: what `gymnasium.make` is told beside it.
        observe: ``module:function``, from an observation to a text; empty: its numbers.
        act: ``module:function``, from a reply to an action, which raises ValueError for a reply
            that names none; empty: the last numbers of the reply, as many as the space wants.
        shows: of each observation its "text", the rendered "picture", or "both".
        seed_field: field of the data row that seeds the environment; without it, the run does.
    """

    kind: Literal["gymnasium"] = "gymnasium"
    id: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    observe: str = ""
    act: str = ""
    shows: Literal["text", "picture", "both"] = "text"
    seed_field: str = "seed"

    def __post_init__(self) -> None:
        for reference in (self.observe, self.act):
            if reference:
                check_reference(reference)

    def build(self) -> "GymnasiumEnvironment":
        """Make one to see whether it can be made.

        Raises:
            UserCodeError: if Gymnasium is not installed, has no such environment, or the
                environment renders no pictures that are to be shown, or has actions that are no
                numbers while ``act`` is empty.
        """
        return GymnasiumEnvironment(self)


class GymnasiumEnvironment:
    """An `Environment` over `gymnasium.make`; its reward is the sum over the episode."""

    def __init__(self, config: GymnasiumEnvironmentConfig) -> None:
        self._config = config
        self._threads: set[OwnThread] = set()
        self._observe: Callable[[Any], str] = (
            load_callable(config.observe) if config.observe else observation_text
        )
        try:
            env = self._make()
            if config.shows != "text":
                env.reset()
                _frame(env)
        except Exception as error:
            raise UserCodeError(f"environment {config.id} cannot be made: {error}") from error
        space = env.action_space
        if not config.act and not _is_numbers(space):
            raise UserCodeError(
                f"environment {config.id}: an action of {space} is no array of numbers, and cannot "
                "be read off a reply without a function for 'act'"
            )
        self._act: Callable[[str], Any] = (
            load_callable(config.act) if config.act else lambda text: numbers_action(text, space)
        )
        env.close()

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:
        """None."""
        return ()

    async def play(self, row: PromptRow, chat: Chat, seed: int) -> Mapping[str, float]:
        """Play until the environment ends, or the model may say no more."""
        # what renders may have to stay in the thread it began in
        thread = OwnThread(f"episode of {self._config.id}")
        self._threads = {each for each in self._threads if each.is_alive()} | {thread}
        last: list[Callable[[], object]] = []
        try:
            env = await thread.run(self._make)
            last.append(env.close)
            begin = int(row.fields.get(self._config.seed_field, seed)) % _SEED_LIMIT
            return {"environment": await self._steps(thread.run, env, chat, (opening(row), begin))}
        finally:
            thread.end(*last)  # after a step that may never end

    async def aclose(self) -> None:
        """Wait a moment for episodes to close theirs; a step that never ends is left alone."""
        until = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            await asyncio.to_thread(thread.join, max(0.0, until - time.monotonic()))

    async def _steps(
        self, run: _Run, env: Any, chat: Chat, begin: tuple[Sequence[Message], int]
    ) -> float:
        first, seed = begin
        messages = _with_observation(first, await run(self._reset, env, seed))
        total = 0.0
        while True:
            reply = await chat.reply(messages)
            try:
                action = self._act(reply.text)
            except ValueError as error:
                content: _Content = f"error: {error}"
            else:
                content, reward, has_ended = await run(self._step, env, action)
                total += reward
                if has_ended:
                    return total
            if reply.is_last:
                return total
            messages = ({"role": "user", "content": content},)

    def _reset(self, env: Any, seed: int) -> _Content:
        observation, _ = env.reset(seed=seed)
        return self._content(env, observation)

    def _step(self, env: Any, action: Any) -> tuple[_Content, float, bool]:
        observation, reward, terminated, truncated, _ = env.step(action)
        has_ended = bool(terminated or truncated)
        return "" if has_ended else self._content(env, observation), float(reward), has_ended

    def _content(self, env: Any, observation: Any) -> _Content:
        """Return what is said of an observation."""
        if self._config.shows == "text":
            return self._observe(observation)
        frame: list[Mapping[str, Any]] = [{"type": "image", "image": _frame(env)}]
        if self._config.shows == "picture":
            return frame
        return [*frame, {"type": "text", "text": self._observe(observation)}]

    def _make(self) -> Any:  # a gymnasium.Env, which this module imports when it is used only
        import gymnasium

        shown = {} if self._config.shows == "text" else {"render_mode": "rgb_array"}
        settings: dict[str, Any] = {**shown, **self._config.settings}
        return gymnasium.make(self._config.id, **settings)


def observation_text(observation: Any) -> str:
    """Return an observation's numbers, three digits after the point; text stays as it is.

    One of parts of several kinds or shapes has a line for each, ``name: numbers``, after its key,
    its field or its place: ``camera.position: 0.500 1.000``.
    """
    return "\n".join(f"{name}: {said}" if name else said for name, said in _said(observation, ""))


def _said(observation: Any, name: str) -> Iterator[tuple[str, str]]:  # of any space
    """Yield the texts of its parts by name."""
    parts: Mapping[Any, Any] | None = None
    if isinstance(observation, Mapping):
        parts = cast(Mapping[Any, Any], observation)
    elif isinstance(observation, tuple | list) and not _is_array(observation):
        fields: Mapping[Any, Any] | None = getattr(observation, "_asdict", lambda: None)()
        parts = fields if fields is not None else dict(enumerate(cast(Sequence[Any], observation)))
    if parts is None:
        yield name, _numbers_text(observation)
        return
    for key, part in parts.items():
        yield from _said(part, f"{name}.{key}" if name else str(key))


def _is_array(observation: Any) -> bool:
    try:
        return np.asarray(observation).dtype.kind in "iufb"
    except ValueError:  # such as arrays of different shapes
        return False


def _numbers_text(observation: Any) -> str:
    if isinstance(observation, str) or observation is None:
        return str(observation or "")
    array = np.asarray(observation)
    if array.dtype.kind in "iub":
        return " ".join(str(int(value)) for value in array.ravel())
    return " ".join(f"{float(value):.3f}" for value in array.ravel())


def numbers_action(text: str, space: Any) -> Any:  # a gymnasium.Space, and an element of it
    """Read the last numbers of a reply as an element of a space.

    Raises:
        ValueError: if there are too few, or they are outside of it.
    """
    sample = np.asarray(space.sample())
    found = _NUMBER.findall(text)[-sample.size :]
    if len(found) < sample.size:
        raise ValueError(f"expected {sample.size} numbers of {space}, found {len(found)}")
    try:
        numbers = np.array([float(number) for number in found]).reshape(sample.shape)
        with np.errstate(invalid="ignore", over="ignore"):  # what does not fit is told below
            action = numbers.astype(sample.dtype)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"expected an action of {space}: {error}") from error
    fits = bool(np.isfinite(numbers).all()) and np.allclose(action, numbers)
    if not fits or not space.contains(action if action.ndim else action[()]):
        raise ValueError(f"expected an action of {space}, found {' '.join(found)}")
    return action if action.ndim else action[()]


def _is_numbers(space: Any) -> bool:  # a gymnasium.Space
    return _is_array(space.sample())


def _with_observation(messages: Sequence[Message], content: _Content) -> tuple[Message, ...]:
    *before, last = messages
    if isinstance(last["content"], str) and isinstance(content, str):
        return (*before, {**last, "content": f"{last['content']}\n{content}"})
    return (*before, {**last, "content": [*_parts(last["content"]), *_parts(content)]})


def _parts(content: _Content) -> Sequence[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _frame(env: Any) -> bytes:
    """Return what the environment renders now, as a file's bytes."""
    from PIL import Image

    pixels = np.asarray(env.render())
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise UserCodeError(
            f"expected an RGB picture of render(), found {pixels.dtype}{list(pixels.shape)}"
        )
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()
