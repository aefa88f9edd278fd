"""One conversation of an environment with an engine, every token of it on a tape."""

import asyncio
import contextlib
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

from cosmos_core.media import MediaError, with_media
from cosmos_rollout.engine import AnsweringEngine, GeneratedSample, GenerationRequest, Sampling
from cosmos_rollout.environments.environment import Environment, EpisodeLimits, Reply
from cosmos_rollout.environments.rendering import ChatRenderer
from cosmos_rollout.episode import Episode, Message, Tape
from cosmos_rollout.errors import EpisodeError, PromptError, PromptTooLongError, RolloutError
from cosmos_rollout.prompts import PromptRow
from cosmos_rollout.user_code import is_cancelled, words_of

_SEED_MASK = (1 << 62) - 1
_SEED_STEP = 0x9E3779B97F4A7C15
_NO_ROOM = Reply(text="", finish_reason="length", is_last=True)


class Conversation:
    """A `Chat` over an engine.

    Args:
        engine: what answers.
        renderer: messages to tokens.
        name: request id of the first turn, from which those of the others follow.
        sampling: of the first turn; later ones draw from seeds of their own.
        limits: of the episode.
    """

    def __init__(
        self,
        engine: AnsweringEngine,
        renderer: ChatRenderer,
        *,
        name: str,
        sampling: Sampling,
        limits: EpisodeLimits,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._name = name
        self._sampling = sampling
        self._limits = limits
        self._tape = Tape()
        self._asked: tuple[int, ...] = ()  # the tape, with one mark for each picture or video
        self._images: tuple[str, ...] = ()
        self._metrics: dict[str, float] = {}
        self._messages: list[Message] = []
        self._last: Reply | None = None
        self._num_calls = 0
        self._num_turns = 0
        self._num_prompt_tokens = 0
        self._last_token: int | None = None
        self._fault: BaseException | None = None
        self._is_answering = False
        self._deadline: asyncio.Timeout | None = None
        self._num_uncounted = 0
        self._left_s: float | None = None

    async def reply(self, messages: Sequence[Message]) -> Reply:
        """Say what is new and return the answer; see `Chat.reply`."""
        if self._fault is not None:
            raise self._fault
        if self._is_answering:
            raise EpisodeError("a reply was asked for before the one before it had come")
        if self._last is not None and self._last.is_last:
            raise EpisodeError("the reply before was the last: a limit was reached")
        self._is_answering = True
        self._suspend()
        try:
            self._last = await self._next(messages)
        finally:
            self._is_answering = False
            self._allow()  # also for what it makes of an error
        return self._last

    @contextlib.contextmanager
    def uncounted(self) -> Generator[None]:
        """Stop the environment's time; see `TimedChat.uncounted`."""
        if self._deadline is not None and not self._num_uncounted:
            now, until = asyncio.get_running_loop().time(), self._deadline.when()
            self._left_s = None if until is None else until - now
            self._suspend()
        self._num_uncounted += 1
        try:
            yield
        finally:
            self._num_uncounted -= 1
            if not self._num_uncounted and self._left_s is not None:
                self._allow(self._left_s)

    def show(self, tools: Sequence[Mapping[str, object]]) -> None:
        """Show other tools; see `InformedChat.show`."""
        if self._num_turns or self._is_answering:
            raise EpisodeError("other tools were to be shown after something was said")
        self._renderer = self._renderer.showing(tools)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Keep numbers by name; see `InformedChat.note`. Those that are not finite are left out."""
        self._metrics |= {name: float(n) for name, n in metrics.items() if math.isfinite(n)}

    async def play(self, environment: Environment, row: PromptRow, seed: int) -> Episode:
        """Have the environment play with this chat; return the episode.

        Raises:
            EpisodeError: if the environment failed, was too slow, or never let the model speak.
            EngineError: if the engine failed, whatever the environment made of it.
            PromptError: if the opening is nothing that the engine can continue.
        """
        failure: BaseException | None = None
        rewards: Mapping[str, float] = {}
        try:
            async with asyncio.timeout(None) as self._deadline:
                self._allow()
                rewards = await environment.play(row, self, seed)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            failure = error  # of a task of its own
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it may raise anything
            failure = error
        if self._fault is not None:
            raise self._fault
        if failure is not None:
            raise EpisodeError(self._words(failure)) from failure
        return self._episode(_numbers(rewards))

    def _words(self, failure: BaseException) -> str:
        if isinstance(failure, EpisodeError):
            return words_of(failure)
        if self._deadline is not None and self._deadline.expired():
            return f"no move within {self._limits.timeout_s} s"
        return f"{type(failure).__name__}: {words_of(failure)}"[:500]

    async def _next(self, messages: Sequence[Message]) -> Reply:
        plain, images = await _without_media(messages)
        tokens = self._render(plain)
        num_tokens = self._tape.num_tokens + len(tokens)
        if self._num_turns and num_tokens >= self._engine.context_length:
            return _NO_ROOM
        return await self._answer(tokens, plain, images)

    async def _answer(
        self, tokens: tuple[int, ...], messages: Sequence[Message], images: tuple[str, ...]
    ) -> Reply:
        turn = self._num_turns
        seed = (self._sampling.seed + turn * _SEED_STEP) & _SEED_MASK
        request = GenerationRequest(
            request_id=self._name if not turn else f"{self._name}.{turn}",
            prompt_token_ids=self._asked + tokens,
            sampling=self._sampling.with_seed(seed),
            images=self._images + images,
        )
        try:
            sample = await self._sample(request)
        except PromptTooLongError:
            if not turn:
                raise
            return _NO_ROOM  # pictures were more tokens than could be known before
        self._record(request, sample)
        if not turn:
            self._num_prompt_tokens = self._tape.num_tokens - len(sample.token_ids)
        said = sample.token_ids.tolist()
        text = self._renderer.reply_text(said)
        self._num_turns += 1
        self._messages += [*messages, {"role": "assistant", "content": text}]
        reason = sample.finish_reason
        if reason != "stop":
            return Reply(text=text, content=text, finish_reason=reason, is_last=True)
        found = self._renderer.read(said, num_calls=self._num_calls)
        self._num_calls += len(found.calls)
        return Reply(
            text=text,
            content=found.content,
            calls=found.calls,
            finish_reason=reason,
            is_last=turn + 1 >= self._limits.max_turns,
        )

    def _record(self, request: GenerationRequest, sample: GeneratedSample) -> None:
        """Put on the tape what came since the turn before, as the model saw it."""
        prompt = sample.prompt_token_ids or request.prompt_token_ids
        before = self._tape.token_ids
        if prompt[: len(before)] != before:
            raise EpisodeError("the engine turned a picture into other tokens than the turn before")
        self._tape.given(prompt[len(before) :])
        self._tape.sampled(sample)
        said = tuple(sample.token_ids.tolist())
        self._asked, self._images = request.prompt_token_ids + said, request.images
        self._last_token = said[-1]

    async def _sample(self, request: GenerationRequest) -> GeneratedSample:
        try:
            async with aclosing(self._engine.generate([request])) as samples:
                return await anext(samples)
        except RolloutError as error:
            if not (self._num_turns and isinstance(error, PromptError)):  # as it said something bad
                self._fault = error  # ours, and not the environment's to swallow
            raise

    def _render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        if self._last_token is None:
            return self._renderer.opening(messages)
        calls = self._last.calls if self._last is not None else ()
        return self._renderer.following(messages, self._last_token, calls)

    def _episode(self, rewards: Mapping[str, float]) -> Episode:
        if self._last is None:
            raise EpisodeError("the environment ended before the model said anything")
        bad = [f"{name} {value}" for name, value in rewards.items() if not math.isfinite(value)]
        if bad:
            raise EpisodeError(f"the environment's rewards are not finite: {', '.join(bad)}")
        token_ids, logprobs, trainable = self._tape.arrays()
        return Episode(
            num_prompt_tokens=self._num_prompt_tokens,
            token_ids=token_ids,
            logprobs=logprobs,
            trainable=trainable,
            versions=self._tape.versions,
            finish_reason=self._last.finish_reason,
            num_turns=self._num_turns,
            response=self._messages[-1]["content"],
            messages=tuple(self._messages),
            rewards=rewards,
            metrics=self._metrics,
            images=self._images,
            marked_token_ids=self._asked if self._images else (),
        )

    def _allow(self, left_s: float | None = None) -> None:
        """Start the environment's time, all of it or what is left."""
        if self._deadline is not None and not self._deadline.expired():
            now = asyncio.get_running_loop().time()
            self._deadline.reschedule(now + (self._limits.timeout_s if left_s is None else left_s))

    def _suspend(self) -> None:
        """Stop the environment's time: the model is at it."""
        if self._deadline is not None:
            self._deadline.reschedule(None)


async def _without_media(
    messages: Sequence[Message],
) -> tuple[Sequence[Message], tuple[str, ...]]:
    """Return messages with marks in place of pictures and videos, and the references of these."""
    if all(isinstance(message.get("content"), str) for message in messages):
        return messages, ()
    try:  # pictures of an environment's own are written to files' bytes
        return await asyncio.to_thread(with_media, messages, folder=Path.cwd())
    except MediaError as error:
        raise EpisodeError(str(error)) from error


def _numbers(rewards: Mapping[str, float]) -> dict[str, float]:
    """Return what an environment says it gave, which may be anything, as numbers."""
    try:
        return {str(name): float(value) for name, value in rewards.items()}
    except (AttributeError, TypeError, ValueError) as error:
        words = f"the environment's rewards have to be numbers by name, found {rewards!r}"
        raise EpisodeError(words[:500]) from error
