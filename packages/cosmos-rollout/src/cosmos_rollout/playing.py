"""How a group is sampled: n replies to one prompt, or n episodes in an environment."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from cosmos_rollout.engine import AnsweringEngine, GenerationRequest, Sampling
from cosmos_rollout.environments import (
    ChatRenderer,
    ChatTokenizer,
    Conversation,
    Environment,
    EpisodeLimits,
)
from cosmos_rollout.episode import Episode, single_turn
from cosmos_rollout.errors import EpisodeError, PromptDataError
from cosmos_rollout.metered import MeteredEngine
from cosmos_rollout.prompts import PromptRow, Tokenizer, prompt_tokens
from cosmos_rollout.rewards import Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """What is to be sampled.

    Attributes:
        row: the prompt.
        name: unique among the groups in flight; siblings append their index.
        seed: the same for every sibling.
        samplings: of each sibling, with a seed of its own.
    """

    row: PromptRow
    name: str
    seed: int
    samplings: tuple[Sampling, ...]


Played = tuple[int, Episode | Failure]
"""Index of a sibling, and its episode, or why it has none."""


class Player(Protocol):
    """Samples the siblings of a group."""

    def play(self, plan: GroupPlan) -> AsyncGenerator[Played, None]:
        """Yield them as they finish; closing the generator aborts the rest.

        Raises:
            PromptError: if the prompt cannot be served.
            EngineError: if the engine cannot go on.
        """
        ...


class SingleTurnPlayer:
    """One prompt, one reply; all siblings are handed to the engine at once."""

    def __init__(self, engine: AnsweringEngine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    async def play(self, plan: GroupPlan) -> AsyncGenerator[Played, None]:
        """Yield the replies as they finish."""
        prompt = prompt_tokens(plan.row, self._tokenizer)
        requests = [
            GenerationRequest(
                request_id=f"{plan.name}.{index}",
                prompt_token_ids=prompt,
                sampling=sampling,
                images=plan.row.images,
            )
            for index, sampling in enumerate(plan.samplings)
        ]
        places = {request.request_id: index for index, request in enumerate(requests)}
        async with aclosing(self._engine.generate(requests)) as samples:
            async for sample in samples:
                tokens = sample.token_ids.tolist()
                text = self._tokenizer.decode(tokens, skip_special_tokens=True)
                index = places[sample.request_id]
                yield index, single_turn(requests[index], sample, text)


class EnvironmentPlayer:
    """Each sibling plays an episode of its own; a failed one costs itself alone.

    Args:
        engine: what answers, told of each episode.
        tokenizer: of the model.
        environment: what all episodes are played with.
        limits: of an episode.

    Raises:
        PromptDataError: if the tokenizer has no chat template to speak of.
    """

    def __init__(
        self,
        engine: MeteredEngine,
        tokenizer: ChatTokenizer,
        environment: Environment,
        limits: EpisodeLimits,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer, environment.tools, limits.tool_format)
        try:
            self._renderer.opening([{"role": "user", "content": "?"}])
        except Exception as error:  # a template may raise anything
            raise PromptDataError(
                f"an environment needs a tokenizer whose chat template takes a question: {error}"
            ) from error
        self._environment = environment
        self._limits = limits

    async def play(self, plan: GroupPlan) -> AsyncGenerator[Played, None]:
        """Yield the episodes as they finish."""
        tasks = [
            asyncio.create_task(self._episode(plan, index)) for index in range(len(plan.samplings))
        ]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _episode(self, plan: GroupPlan, index: int) -> Played:
        conversation = Conversation(
            self._engine,
            self._renderer_of(plan.row),
            name=f"{plan.name}.{index}",
            sampling=plan.samplings[index],
            limits=self._limits,
        )
        try:
            with self._engine.episode():
                return index, await conversation.play(self._environment, plan.row, plan.seed)
        except EpisodeError as error:
            cause = error.__cause__ or error
            name = type(cause).__name__
            return index, Failure(reward="environment", error=name, message=str(error))

    def _renderer_of(self, row: PromptRow) -> ChatRenderer:
        """Return what shows the environment's tools, or those of the row where it has none."""
        if self._environment.tools or not row.tools:
            return self._renderer
        return ChatRenderer(self._tokenizer, row.tools, self._limits.tool_format)
