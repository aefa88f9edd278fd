"""Asking a teacher: replicas of another model that score samples while others are generated.

They are servers of OpenAI's completions that know ``prompt_logprobs``, as vLLM's does. Which there
are is looked up anew for every try, so one that died and came back at another address is found::

    score ─► least busy replica ── answered ─► TeacherScores
                ▲          │ gone, failing, too slow
                └── wait ──┘ until the deadline ─► TeacherError
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import httpx

from cosmos_core.trajectory import TeacherScores
from cosmos_rollout.engine import Shown
from cosmos_rollout.engines.prompt_scores import asked_scores, read_scores
from cosmos_rollout.engines.text_tokens import asked_tokens, read_tokens
from cosmos_rollout.episode import Episode
from cosmos_rollout.errors import EngineError, NoPicturesError, TeacherError
from cosmos_rollout.rewards import Failure

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0
_NOBODY = "there is none"
_GREETING_S = 10.0
_LATELY_S = 10.0
"""Whoever failed within so many seconds is asked after the others."""
_TOO_MANY_REQUESTS = 429
_UNFIT = (httpx.HTTPError, TimeoutError, EngineError, KeyError, TypeError, ValueError)
"""What a replica that is gone, or something else at its address, makes of a question."""
T = TypeVar("T")


class Teacher(Protocol):
    """Scores samples with another model."""

    @property
    def num_tries(self) -> int:
        """Grows as long as somebody is being asked."""
        ...

    async def score(self, token_ids: Sequence[int], shown: Shown | None = None) -> TeacherScores:
        """Return what the teacher makes of every token after the first, which gets 0.

        Args:
            token_ids: the tokens.
            shown: pictures and videos that some of them stand for.

        Raises:
            TeacherError: if nobody scored them in time, or nobody ever would.
            NoPicturesError: if teachers are shown no pictures.
        """
        ...


async def teach(teacher: Teacher, episode: Episode) -> TeacherScores | Failure:
    """Return what a teacher makes of the tokens that the model sampled, or why it says nothing."""
    try:
        scores = await teacher.score(episode.token_ids.tolist(), episode.shown)
    except (TeacherError, NoPicturesError) as error:
        return Failure(reward="teacher", error=type(error).__name__, message=str(error))
    return scores.where(episode.trainable)


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherSettings:
    """How teachers are asked.

    Attributes:
        model: their model's name.
        token: what they want to be shown; empty: nothing.
        top_k: how many likeliest tokens are asked for at each place.
        deadline_s: longest that a sample waits for its scores, over all tries. Of two servers the
            first that is asked has half of it, so that one that hangs costs no sample.
        max_running: samples that are scored at once; more wait their turn.
        show_pictures: whether they are told of pictures and videos beside the tokens, by the
            ``images`` and the ``marked_prompt`` of `Shown`. Only a run's own teachers look at
            these; others would score the tokens and not see anything.
    """

    model: str = "teacher"
    token: str = ""
    top_k: int = 0
    deadline_s: float = 120.0
    max_running: int = 64
    show_pictures: bool = False

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: naming the setting.
        """
        if self.max_running < 1 or not 0.0 < self.deadline_s < math.inf:
            raise ValueError(
                "deadline_s and max_running have to be positive and finite, found "
                f"{self.deadline_s} and {self.max_running}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k has to be 0 or more, found {self.top_k}")


class TeacherReplicas:
    """A `Teacher` over any number of servers; used from one asyncio loop.

    Args:
        urls: returns the addresses there are now, each up to and with ``/v1``.
        settings: how they are asked.
    """

    def __init__(self, urls: Callable[[], Sequence[str]], settings: TeacherSettings) -> None:
        self._urls = urls
        self._settings = settings
        self._places = asyncio.Semaphore(settings.max_running)
        self._running: Counter[str] = Counter()
        self._failed_at: dict[str, float] = {}
        self._num_tries = 0
        self._last_failure = _NOBODY
        headers = {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=settings.deadline_s,
            limits=httpx.Limits(max_connections=settings.max_running),
            trust_env=False,  # no proxy from the environment
        )

    @property
    def num_tries(self) -> int:
        """Requests sent or given up, so far."""
        return self._num_tries

    @property
    def last_failure(self) -> str:
        """Why the last try that came to nothing did: whom it asked, and what went wrong."""
        return self._last_failure

    async def ready(self, deadline_s: float) -> None:
        """Return when a teacher answers.

        Raises:
            TeacherError: if none did in time.
        """
        words = f"no teacher answered within {deadline_s:g} s"
        await self._until(time.monotonic() + deadline_s, self._greet, words)

    async def score(self, token_ids: Sequence[int], shown: Shown | None = None) -> TeacherScores:
        """Return the scores; see `Teacher.score`."""
        if shown is not None and not self._settings.show_pictures:
            raise NoPicturesError(
                f"a teacher sees none of the sample's {len(shown.images)} pictures or videos"
            )
        tokens = [int(token) for token in token_ids]
        deadline_s = self._settings.deadline_s
        words = f"no teacher scored {len(tokens)} tokens within {deadline_s:g} s"
        async with self._places:
            ask = partial(self._ask, tokens, shown)
            return await self._until(time.monotonic() + deadline_s, ask, words)

    async def tokens_of(self, text: str) -> list[int]:
        """Return the tokens that a teacher makes of a text, without special ones around it.

        Raises:
            TeacherError: if nobody answered in time, or whoever did does not tell.
        """
        deadline_s = self._settings.deadline_s
        words = f"no teacher told the tokens of a text within {deadline_s:g} s"
        ask = partial(self._ask_tokens, text)
        return await self._until(time.monotonic() + deadline_s, ask, words)

    async def aclose(self) -> None:
        """Hang up. Idempotent."""
        await self._client.aclose()

    async def _until(self, end: float, ask: Callable[[str], Awaitable[T]], words: str) -> T:
        """Ask one after the other until somebody answers, or time is up."""
        wait_s, asked = _FIRST_WAIT_S, Counter[str]()
        while True:
            self._num_tries += 1
            urls = self._urls()
            num_new = sum(asked[one] == 0 for one in urls)
            last = _NOBODY
            if urls:
                url = self._fittest(urls, asked)
                asked[url] += 1
                self._running[url] += 1
                try:  # one that hangs leaves the others their part of the time
                    left_s = max(0.0, end - time.monotonic())
                    async with asyncio.timeout(left_s / max(1, num_new)):
                        return await ask(url)
                except _UNFIT as error:
                    last = f"{url}: {error!r}"
                    self._failed_at[url] = time.monotonic()
                finally:
                    self._running[url] -= 1
            self._last_failure = last
            if num_new > 1 and time.monotonic() < end:
                continue  # somebody else may answer at once
            if time.monotonic() + wait_s > end:
                raise TeacherError(f"{words}; at last: {last}")
            await asyncio.sleep(wait_s)
            wait_s = min(2.0 * wait_s, _LONGEST_WAIT_S)

    def _fittest(self, urls: Sequence[str], asked: Counter[str]) -> str:
        """Return whom to ask: asked least for this, without a failure lately, with least to do."""
        lately = time.monotonic() - _LATELY_S

        def key(url: str) -> tuple[int, bool, int]:
            return asked[url], self._failed_at.get(url, -math.inf) > lately, self._running[url]

        return min(urls, key=key)

    async def _greet(self, url: str) -> None:
        """See that the model is there."""
        response = await self._client.get(f"{url}/models", timeout=_GREETING_S)
        self._raise_refusal(url, response)
        names = sorted(model["id"] for model in response.json()["data"])
        if self._settings.model not in names:
            raise TeacherError(f"{url} serves {names}, not {self._settings.model!r}")

    async def _ask(self, tokens: Sequence[int], shown: Shown | None, url: str) -> TeacherScores:
        settings = self._settings
        body = {"model": settings.model, "prompt": tokens} | asked_scores(settings.top_k)
        if shown is not None:
            body |= {"marked_prompt": shown.marked_token_ids, "images": shown.images}
        response = await self._client.post(f"{url}/completions", json=body)
        self._raise_refusal(url, response)
        return read_scores(tokens, response.json(), top_k=settings.top_k, whom=url)

    async def _ask_tokens(self, text: str, url: str) -> list[int]:
        body = {"model": self._settings.model} | asked_tokens(text)
        response = await self._client.post(f"{url}/completions", json=body)
        self._raise_refusal(url, response)
        try:
            return read_tokens(response.json(), url)
        except EngineError as error:  # it would not tell the next time either
            raise TeacherError(str(error)) from error

    def _raise_refusal(self, url: str, response: httpx.Response) -> None:
        """Give up on what would be refused by any replica; another may do what this one cannot."""
        if response.is_server_error or response.status_code == _TOO_MANY_REQUESTS:
            raise EngineError(f"answered {response.status_code}: {response.text[:500]}")
        if response.is_error:
            raise TeacherError(f"{url} answered {response.status_code}: {response.text[:500]}")
