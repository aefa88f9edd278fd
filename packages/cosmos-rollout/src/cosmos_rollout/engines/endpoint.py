"""An engine at the other end of HTTP: an OpenAI-compatible server that takes and gives token ids.

For evaluation, and for teachers. vLLM's server is one (``vllm serve``), with ``return_token_ids``
and the log-probs of given tokens as its additions to the interface. Its weights are whatever it
serves, under one version; it can be neither swapped nor frozen from here. With a temperature other
than 1 its log-probs are those sampled from only if it runs with
``--logprobs-mode processed_logprobs``.
"""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import numpy.typing as npt

from cosmos_core.trajectory import TeacherScores, VersionSpan
from cosmos_rollout.checking import check_requests, refuse_pictures
from cosmos_rollout.engine import (
    GeneratedSample,
    GenerationRequest,
    LoadReport,
)
from cosmos_rollout.engines.prompt_scores import asked_scores, read_scores
from cosmos_rollout.engines.retrying import Patience, patiently, refused
from cosmos_rollout.engines.setup import EngineSetup
from cosmos_rollout.engines.tasks import names_of, samples_as_finished
from cosmos_rollout.engines.text_tokens import asked_tokens, read_tokens
from cosmos_rollout.errors import (
    EngineClosedError,
    EngineError,
    EngineStartError,
    PromptRefusedError,
    WeightLoadError,
)
from cosmos_rollout.one_loop import OneLoop
from cosmos_rollout.web_addresses import check_url, headers_of

_ANY_TOKEN = 1 << 31
_BAD_REQUEST = frozenset({400, 413, 422})  # too long, of tokens that it does not have, malformed
# Said with each request: a server takes its own from the model's generation_config.json otherwise.
_NOTHING_ELSE = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointConfig:
    """Where an OpenAI-compatible server listens.

    Attributes:
        kind: selects this engine.
        url: up to and with ``/v1``.
        model: its name there.
        key_file: file that holds the bearer token; None: none is sent.
        context_length: most tokens of prompt and response; 0: what the server says.
        vocabulary_size: token ids are below this; 0: left to the server to check.
        max_running: requests under way at once; more wait their turn here.
        timeout_s: seconds without a byte from the server after which a request has failed. Until
            then it is sent again to a server that is busy (429, 5xx) or hung up, after a back-off
            that is as long as the server asks for (``Retry-After``) or longer.
        connect_s: seconds in which a server that has gone may come back, such as one that is
            restarted: one that cannot be connected to for longer has failed.
    """

    kind: Literal["endpoint"] = "endpoint"
    url: str
    model: str
    key_file: Path | None = None
    context_length: int = 0
    vocabulary_size: int = 0
    max_running: int = 64
    timeout_s: float = 120.0
    connect_s: float = 20.0

    def __post_init__(self) -> None:
        check_url(self.url)
        limits_s = (self.timeout_s, self.connect_s)
        if self.max_running < 1 or not all(0.0 < limit_s < math.inf for limit_s in limits_s):
            raise ValueError("max_running, timeout_s and connect_s have to be positive and finite")

    async def build(self, setup: EngineSetup) -> "EndpointEngine":
        """Ask the server for its models; of ``setup`` only the version counts.

        Raises:
            EngineStartError: if it cannot be reached, or does not have the model.
        """
        client = self._client()
        try:
            response = await client.get("models")
            response.raise_for_status()
            models = {model["id"]: model for model in response.json()["data"]}
            if self.model not in models:
                raise EngineStartError(f"{self.url} serves {sorted(models)}, not {self.model!r}")
            length = self.context_length or int(models[self.model].get("max_model_len") or 0)
            if not length:
                raise EngineStartError(f"{self.url} does not tell its context_length: set it")
        except (httpx.HTTPError, AttributeError, KeyError, TypeError, ValueError) as error:
            await client.aclose()
            raise EngineStartError(f"{self.url} is no endpoint to use: {error!r}") from error
        except BaseException:
            await client.aclose()
            raise
        return EndpointEngine(self, client, version=setup.version, context_length=length)

    def _client(self) -> httpx.AsyncClient:
        try:
            headers = headers_of(self.key_file)
        except OSError as error:
            raise EngineStartError(f"cannot read the key of {self.url}: {error}") from error
        return httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(self.timeout_s, connect=min(self.timeout_s, self.connect_s)),
            limits=httpx.Limits(max_connections=self.max_running),
            trust_env=False,  # no proxy from the environment
        )


class EndpointEngine:
    """A `RolloutEngine`, and a teacher, over HTTP; made by `EndpointConfig.build`."""

    def __init__(
        self,
        config: EndpointConfig,
        client: httpx.AsyncClient,
        *,
        version: int,
        context_length: int,
    ) -> None:
        self._config = config
        self._client = client
        self._version = version
        self._context_length = context_length
        self._places = asyncio.Semaphore(config.max_running)
        self._gate = asyncio.Event()
        self._gate.set()
        self._num_tokens = 0
        self._tasks: set[asyncio.Task[GeneratedSample]] = set()
        self._is_closed = False
        self._loop = OneLoop("this engine")
        self._loop.check()
        self._patience = Patience(
            whom=config.url, answer_s=config.timeout_s, connect_s=config.connect_s
        )

    @property
    def weight_version(self) -> int:
        """The version that its weights are said to be."""
        return self._version

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and response."""
        return self._context_length

    @property
    def num_running(self) -> int:
        """Requests in flight, those that wait for a place included."""
        return len(self._tasks)

    @property
    def num_tokens_generated(self) -> int:
        """Tokens received since the start."""
        return self._num_tokens

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[GeneratedSample, None]:
        """Yield the samples as they finish; see `RolloutEngine.generate`."""
        self._raise_if_closed()
        refuse_pictures(requests, f"{self._config.url}, which is given tokens,")
        size = self._config.vocabulary_size or _ANY_TOKEN
        checked = check_requests(
            requests,
            context_length=self._context_length,
            vocabulary_size=size,
            in_flight=names_of(self._tasks),
        )
        async with aclosing(samples_as_finished(checked, self._sample, self._tasks)) as samples:
            async for sample in samples:
                yield sample

    async def score(self, token_ids: Sequence[int], top_k: int = 0) -> TeacherScores:
        """Return what the model makes of each of these tokens after those before it.

        The first, which follows nothing, gets 0.

        Raises:
            EngineError: if the server fails, or does not score tokens it is given.
            TeacherError: if it tells of fewer than ``top_k`` tokens in a place.
        """
        self._raise_if_closed()
        answer = await self._answer(self._body(token_ids) | asked_scores(top_k))
        return read_scores(token_ids, answer, top_k=top_k, whom=self._config.url)

    async def tokens_of(self, text: str) -> list[int]:
        """Return the tokens that the server makes of a text, without special ones around it.

        Raises:
            EngineError: if the server fails, or does not tell.
        """
        self._raise_if_closed()
        answer = await self._answer({"model": self._config.model} | asked_tokens(text))
        return read_tokens(answer, self._config.url)

    async def logprobs(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return float32[T], the log-probs of `score` alone."""
        return (await self.score(token_ids)).logprobs

    async def pause(self) -> None:
        """Send no more requests; those at the server go on."""
        self._raise_if_closed()
        self._gate.clear()

    async def resume(self) -> None:
        """Go on."""
        self._raise_if_closed()
        self._gate.set()

    async def load_version(self, version: int, endpoints: Sequence[str]) -> LoadReport:
        """Refuse: the server's weights are its own.

        Raises:
            WeightLoadError: always.
        """
        del endpoints
        self._raise_if_closed()
        raise WeightLoadError(f"version {version}: {self._config.url} keeps the weights it has")

    async def aclose(self) -> None:
        """Fail what is in flight and hang up. Idempotent."""
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def _answer(self, body: dict[str, Any]) -> Any:
        """Return the JSON of an answer that is no stream."""
        async with self._places:
            try:
                response = await patiently(lambda: self._post(body), self._patience)
            except httpx.HTTPError as error:
                raise EngineError(f"{self._config.url} failed: {error!r}") from error
        try:
            return response.json()
        except ValueError as error:
            raise EngineError(f"{self._config.url} answers no JSON: {error}") from error

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        response = await self._client.post("completions", json=body)
        if response.is_error:
            raise refused(self._config.url, response, response.text)
        return response

    async def _sample(self, request: GenerationRequest) -> GeneratedSample:
        try:
            async with self._places:
                return await patiently(lambda: self._streamed(request), self._patience)
        except asyncio.CancelledError:
            self._raise_if_closed()
            raise
        except (httpx.HTTPError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"request {request.request_id} failed at {self._config.url}: {error!r}"
            ) from error

    async def _streamed(self, request: GenerationRequest) -> GeneratedSample:
        token_ids: list[int] = []
        logprobs: list[float] = []
        await self._gate.wait()
        async with aclosing(self._chunks(request)) as chunks:
            async for choice in chunks:
                token_ids += choice.get("token_ids") or []
                logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
                self._num_tokens += len(choice.get("token_ids") or [])
                reason = choice.get("finish_reason")
                if reason:
                    return self._finished(request.request_id, token_ids, logprobs, reason)
        raise EngineError(f"ended without a last token: request {request.request_id}")

    async def _chunks(self, request: GenerationRequest) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the choices of the stream's events, which are JSON."""
        sampling = request.sampling
        asked = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **_NOTHING_ELSE,
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # only the stop tokens of the request end it
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
        }
        body = self._body(request.prompt_token_ids) | asked
        async with self._client.stream("POST", "completions", json=body) as response:
            if response.is_error:
                text = (await response.aread()).decode(errors="replace")
                error = refused(self._config.url, response, text)
                if response.status_code in _BAD_REQUEST:
                    raise PromptRefusedError(f"request {request.request_id}: {error}")
                raise error
            async for line in response.aiter_lines():
                kind, _, data = line.partition(":")
                if kind == "data" and data.strip() != "[DONE]":
                    event = json.loads(data)
                    if event.get("error"):
                        raise EngineError(f"{self._config.url} failed: {event['error']}")
                    for choice in event.get("choices") or ():  # none: it tells of its use
                        yield choice

    def _body(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"model": self._config.model, "prompt": list(token_ids)}

    def _finished(
        self, request_id: str, token_ids: list[int], logprobs: list[float], reason: str
    ) -> GeneratedSample:
        if reason not in ("stop", "length"):
            raise EngineError(f"ended with {reason!r}: request {request_id}")
        if not token_ids or len(token_ids) != len(logprobs):
            raise EngineError(
                f"request {request_id}: {self._config.url} gave {len(token_ids)} token ids and "
                f"{len(logprobs)} log-probs; it has to know return_token_ids"
            )
        return GeneratedSample(
            request_id=request_id,
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            versions=(VersionSpan(self._version, len(token_ids)),),
            finish_reason=reason,
        )

    def _raise_if_closed(self) -> None:
        self._loop.check()
        if self._is_closed:
            raise EngineClosedError("the engine was closed")
