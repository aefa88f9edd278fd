"""What a rollout engine is: token ids in, sampled tokens with their log-probs and versions out.

The protocols here are all that the rest of the package knows of vLLM, transformers or a script,
and all that engines know of where new weights come from.
"""

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from cosmos_core.trajectory import FinishReason, TeacherScores, VersionSpan
from cosmos_rollout.whole_numbers import token_tuple, whole

if TYPE_CHECKING:
    import torch

KvPolicy = Literal["keep", "recompute"]
SleepPolicy = Literal["keep", "discard"]
"""What becomes of the weights while an engine sleeps: kept in host memory, or given up."""
_SEEDS = range(-(1 << 63), 1 << 64)  # what generators of torch take


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How to sample the tokens of one response.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: keep the likeliest tokens whose probabilities sum to at least this.
        max_new_tokens: the response ends here with reason "length", or earlier where the model's
            context ends.
        seed: with the prompt and the weights it determines the response; of 64 bits.
        stop_token_ids: the response ends with the first of these, which is part of it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature has to be 0 or more, found {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p has to be in (0, 1], found {self.top_p}")
        for name in ("max_new_tokens", "seed"):
            object.__setattr__(self, name, whole(getattr(self, name), name))
        stops = token_tuple(self.stop_token_ids, "stop_token_ids")
        object.__setattr__(self, "stop_token_ids", stops)
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens has to be 1 or more, found {self.max_new_tokens}")
        if self.seed not in _SEEDS:
            raise ValueError(f"seed has to be a number of 64 bits, found {self.seed}")

    def with_seed(self, seed: int) -> "Sampling":
        """Return the same sampling with another seed."""
        return replace(self, seed=seed)

    def greedy(self) -> "Sampling":
        """Return the same sampling with the likeliest token taken each time."""
        return replace(self, temperature=0.0, top_p=1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One response to be sampled.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_token_ids: the prompt, in which each picture or video is one mark.
        sampling: how.
        images: references of the pictures and videos (`cosmos_core.images`,
            `cosmos_core.videos`), one for each mark, in order.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    images: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Take tokens of any sequence, array or tensor of one dimension.

        Raises:
            ValueError: if the tokens are none, or the id is no text.
        """
        if not isinstance(self.request_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"request_id has to be a text, found {self.request_id!r}")
        tokens = token_tuple(self.prompt_token_ids, "prompt_token_ids")
        object.__setattr__(self, "prompt_token_ids", tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """Pictures and videos among tokens that are given as a model saw them.

    Attributes:
        marked_token_ids: the same tokens, with one mark in place of those of each picture or video.
        images: references of the pictures and videos, one for each mark, in order.
    """

    marked_token_ids: tuple[int, ...]
    images: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GeneratedSample:
    """One sampled response of n tokens.

    Attributes:
        request_id: the request it answers.
        token_ids: int32[n], the stop token included.
        logprobs: float32[n], log-probability of each token under the distribution it was drawn
            from: temperature and top-p applied. For a greedy request, under the plain softmax.
        versions: run-length coded weight version of each token; lengths sum to n.
        finish_reason: "stop" for a stop token, "length" for the token or context limit.
        prompt_token_ids: the prompt as the model saw it, where that is not what was asked: each
            mark of a picture or video has become as many tokens as that has.
    """

    request_id: str
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """A weight version that is now in use.

    ``transfer_s`` is how long it took to fetch, while generation went on; ``stall_s`` how long
    generation stood still to put it in place. Keys and values that are to be computed anew are
    computed after that, which is in neither.
    """

    version: int
    transfer_s: float
    stall_s: float


class AnsweringEngine(Protocol):
    """What playing a group takes of an engine; see `RolloutEngine`."""

    @property
    def context_length(self) -> int:
        """Most tokens, prompt and response together, that a request can have."""
        ...

    def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[GeneratedSample, None]:
        """Yield the samples as they finish, in any order; closing the generator aborts the rest."""
        ...


class RolloutEngine(Protocol):
    """An engine that samples many responses at once; used from one asyncio loop.

    Life cycle::

        running ──pause()──► paused ──resume()──► running ──aclose()──► closed
           └── load_version(): fetch, stop at a token boundary, swap, go on ──┘

    A request in flight lives through pauses and loads: its tokens carry the version that sampled
    each of them.
    """

    @property
    def weight_version(self) -> int:
        """The version that samples the next token."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens, prompt and response together, that a request can have."""
        ...

    @property
    def num_running(self) -> int:
        """Requests in flight."""
        ...

    @property
    def num_tokens_generated(self) -> int:
        """Tokens sampled since the start; it grows while anything is in flight."""
        ...

    def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[GeneratedSample, None]:
        """Yield the samples as they finish, in any order; closing the generator aborts the rest.

        Raises:
            PromptError: before anything is generated, if one of the requests cannot be served;
                `DuplicateRequestError` if another one in flight has its id.
            WrongLoopError: in another event loop than the engine's.
            EngineDeadError: if the engine died; whatever was in flight is lost.
            EngineClosedError: after `aclose`.
        """
        ...

    async def pause(self) -> None:
        """Stop at the next token boundary; once this returns no token is sampled. Idempotent."""
        ...

    async def resume(self) -> None:
        """Go on with the requests in flight. Idempotent."""
        ...

    async def load_version(self, version: int, endpoints: Sequence[str]) -> LoadReport:
        """Fetch ``version`` or a newer one while generating, then swap at a token boundary.

        Cancelled while it fetches, the engine keeps its weights; a swap that has begun is finished
        first, so that `weight_version` is what samples the next token.

        Raises:
            EnginePausedError: if the engine was paused by its user.
            WeightLoadError: if the weights could not be had; the ones before stay.
            EngineDeadError: if the engine died.
        """
        ...

    async def aclose(self) -> None:
        """End the engine and its processes within a deadline. Idempotent."""
        ...


class SleepingEngine(RolloutEngine, Protocol):
    """An engine that can give its device to somebody else for a while.

    Life cycle::

        running ──sleep("keep")────► asleep ──wake()──► running
           └─────sleep("discard")──► asleep ──wake()──► without weights ──load_version()──► running

    Requests in flight live through it: the tokens after are those that would have come without,
    from keys and values that are computed anew.
    """

    async def sleep(self, weights: SleepPolicy) -> None:
        """Stop at the next token boundary, give up keys and values, keep or give up the weights.

        Idempotent. ``load_version`` waits for `wake`; after "discard" it has to follow.

        Raises:
            EngineError: if requests are in flight that this engine cannot take through it.
        """
        ...

    async def wake(self) -> None:
        """Have the memory again; go on, if the weights are there. Idempotent."""
        ...


class TokenScorer(Protocol):
    """A model that scores tokens it is given; used from one asyncio loop."""

    @property
    def context_length(self) -> int:
        """Most tokens that it can work on."""
        ...

    async def score(
        self, token_ids: Sequence[int], top_k: int, shown: Shown | None = None
    ) -> TeacherScores:
        """Return what the model makes of each token after those before it, at temperature 1.

        The first, which follows nothing, gets 0.

        Args:
            token_ids: the tokens.
            top_k: how many likeliest tokens are told in each place.
            shown: pictures and videos that some of the tokens stand for.

        Raises:
            PromptError: if these tokens cannot be scored, because the model is shown no pictures
                or makes other tokens of them too; others can.
            EngineError: if the engine failed.
        """
        ...

    async def aclose(self) -> None:
        """End the engine and its processes within a deadline. Idempotent."""
        ...


class StagedWeights(Protocol):
    """Named full tensors of one version, in checkpoint names, complete and verified."""

    @property
    def version(self) -> int:
        """The version they are of."""
        ...

    @property
    def tensors(self) -> Mapping[str, "torch.Tensor"]:
        """Tensor of each checkpoint name."""
        ...


class WeightSource(Protocol):
    """Where an engine in this process gets new weights."""

    def stage(self, version: int, endpoints: Sequence[str]) -> StagedWeights:
        """Fetch ``version`` or a newer one; blocking, called from a worker thread.

        Raises:
            Exception: anything; it becomes a `WeightLoadError`.
        """
        ...


class LoadTimes(Protocol):
    """What a `WeightClient` reports of a load; times in seconds, as in `LoadReport`."""

    @property
    def version(self) -> int:
        """The version now in use."""
        ...

    @property
    def transfer_s(self) -> float:
        """Seconds of fetching, generation going on."""
        ...

    @property
    def stall_s(self) -> float:
        """Seconds that generation stood still."""
        ...


class WeightClient(Protocol):
    """Moves weights into the worker processes of an engine such as vLLM, and swaps them there."""

    @property
    def cache_salt(self) -> str:
        """Salt of the prefix cache for what is asked now; no two loads have the same.

        It changes while the engine stands still for a load: whoever is given the new one has its
        prompt computed by the new weights.
        """
        ...

    async def connect(self, endpoints: Sequence[str]) -> object:
        """Use these endpoints from now on; called when they change."""
        ...

    async def load(self, version: int) -> LoadTimes:
        """Fetch, pause at a token boundary, swap, resume.

        Raises:
            Exception: anything; it becomes a `WeightLoadError`.
        """
        ...


def merge_versions(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Run-length code the version of each token: ``[4, 4, 5]`` is ``(4, 2), (5, 1)``."""
    spans: list[VersionSpan] = []
    for version in versions:
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].length + 1)
        else:
            spans.append(VersionSpan(version, 1))
    return tuple(spans)
