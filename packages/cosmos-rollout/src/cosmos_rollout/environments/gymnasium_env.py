"""A Gymnasium environment as a conversation: observations are said, actions are read off replies.

The prompt of the data row is the instruction; the first observation follows it. A reply that names
no action is told so, and costs a turn. All siblings of a group begin in the same state.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from cosmos_rollout.environments.environment import Chat, opening
from cosmos_rollout.episode import Message
from cosmos_rollout.errors import UserCodeError
from cosmos_rollout.prompts import PromptRow
from cosmos_rollout.user_code import check_reference, load_callable

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_SEED_LIMIT = 1 << 31
Setting = str | int | float | bool


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
        seed_field: field of the data row that seeds the environment; without it, the run does.
    """

    kind: Literal["gymnasium"] = "gymnasium"
    id: str
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    observe: str = ""
    act: str = ""
    seed_field: str = "seed"

    def __post_init__(self) -> None:
        for reference in (self.observe, self.act):
            if reference:
                check_reference(reference)

    def build(self) -> "GymnasiumEnvironment":
        """Make one to see whether it can be made.

        Raises:
            UserCodeError: if Gymnasium is not installed or has no such environment.
        """
        return GymnasiumEnvironment(self)


class GymnasiumEnvironment:
    """An `Environment` over `gymnasium.make`; its reward is the sum over the episode."""

    def __init__(self, config: GymnasiumEnvironmentConfig) -> None:
        self._config = config
        self._observe: Callable[[Any], str] = (
            load_callable(config.observe) if config.observe else observation_text
        )
        try:
            env = self._make()
        except Exception as error:
            raise UserCodeError(f"environment {config.id} cannot be made: {error}") from error
        space = env.action_space
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
        env = await asyncio.to_thread(self._make)
        try:
            begin = int(row.fields.get(self._config.seed_field, seed)) % _SEED_LIMIT
            observation, _ = await asyncio.to_thread(env.reset, seed=begin)
            return {"environment": await self._steps(env, row, chat, observation)}
        finally:
            await asyncio.to_thread(env.close)

    async def aclose(self) -> None:
        """Do nothing: each episode closes its own."""

    async def _steps(self, env: Any, row: PromptRow, chat: Chat, observation: Any) -> float:
        messages = _with_observation(opening(row), self._observe(observation))
        total = 0.0
        while True:
            reply = await chat.reply(messages)
            try:
                action = self._act(reply.text)
            except ValueError as error:
                words = f"error: {error}"
            else:
                step = await asyncio.to_thread(env.step, action)
                total += float(step[1])
                if step[2] or step[3]:  # terminated, truncated
                    return total
                words = self._observe(step[0])
            if reply.is_last:
                return total
            messages = ({"role": "user", "content": words},)

    def _make(self) -> Any:  # a gymnasium.Env, which this module imports when it is used only
        import gymnasium

        settings: dict[str, Any] = dict(self._config.settings)
        return gymnasium.make(self._config.id, **settings)


def observation_text(observation: Any) -> str:
    """Return an observation's numbers, three digits after the point; text stays as it is."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {observation_text(value)}" for key, value in observation.items())
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
        action = numbers.astype(sample.dtype)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"expected an action of {space}: {error}") from error
    if not np.allclose(action, numbers) or not space.contains(
        action if action.ndim else action[()]
    ):
        raise ValueError(f"expected an action of {space}, found {' '.join(found)}")
    return action if action.ndim else action[()]


def _with_observation(messages: Sequence[Message], words: str) -> tuple[Message, ...]:
    *before, last = messages
    return (*before, {**last, "content": f"{last['content']}\n{words}"})
