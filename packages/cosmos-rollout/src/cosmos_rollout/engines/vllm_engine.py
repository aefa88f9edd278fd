"""The vLLM engine: an `AsyncLLM`, token ids in and out, as a `RolloutEngine`.

Log-probs are vLLM's "processed" ones, those of the distribution each token was drawn from: with
temperature 1 and no top-p that is the plain softmax, with a model that sees over all tokens but
those that stand for pictures and videos, which are never sampled. The version of each token comes
from vLLM's own spans, whose labels are our version numbers.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, cast

from vllm.exceptions import VLLMClientError, VLLMServerError
from vllm.inputs.engine import EngineInput, tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VLLMDeadError

from cosmos_core.trajectory import TeacherScores
from cosmos_rollout.carried_through import carry_through
from cosmos_rollout.checking import check_request, check_requests
from cosmos_rollout.engine import (
    GeneratedSample,
    GenerationRequest,
    KvPolicy,
    LoadReport,
    Sampling,
    Shown,
    SleepPolicy,
    WeightClient,
)
from cosmos_rollout.engines.prompt_scores import scores_of
from cosmos_rollout.engines.setup import EngineSetup
from cosmos_rollout.engines.tasks import names_of, samples_as_finished
from cosmos_rollout.engines.vllm_arguments import ALWAYS, cpu_arguments, missing_for_sight
from cosmos_rollout.engines.vllm_executors import (
    TetheredMultiprocExecutor,
    TetheredUniProcExecutor,
)
from cosmos_rollout.engines.vllm_launching import launch
from cosmos_rollout.engines.vllm_pictures import Prompts, VLLMPictures
from cosmos_rollout.engines.vllm_sampling import parameters_of, sample_of
from cosmos_rollout.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EnginePausedError,
    EngineSettingsError,
    EngineStartError,
    WeightLoadError,
)
from cosmos_rollout.fresh_thread import in_fresh_thread
from cosmos_rollout.one_loop import OneLoop

_NEVER_LOADED = "as it was made"
_HALF_LOADED = "version {} is half loaded"
_ANSWER_S = 30.0
"""Asked whether it stands still, the engine's process may be in the midst of a step."""


async def start_vllm_engine(
    arguments: Mapping[str, Any], setup: EngineSetup, kv: KvPolicy, shutdown_s: float
) -> "VLLMEngine":
    """Start the engine processes in a thread, so that the caller's loop stays alive.

    Raises:
        EngineStartError: with vLLM's own words; `EngineSettingsError` or `EngineMemoryError` where
            they say that settings or memory are the cause.
    """
    is_cpu = current_platform.is_cpu()
    on_device = cpu_arguments(setup.model, arguments["dtype"]) if is_cpu else {}
    workers = arguments["tensor_parallel_size"] * arguments["pipeline_parallel_size"]
    executor = TetheredUniProcExecutor if workers == 1 else TetheredMultiprocExecutor
    if setup.can_sleep and not is_cpu:
        on_device["enable_sleep_mode"] = True
    chosen = {
        **on_device,
        **arguments,
        **ALWAYS,
        **setup.engine_arguments,
        "model": str(setup.model),
        "distributed_executor_backend": executor,
    }
    try:
        llm = await in_fresh_thread(partial(launch, chosen, may_fork=setup.may_fork))
        await llm.update_weight_version(str(setup.version))
    except EngineStartError as error:
        lacking = missing_for_sight(setup.model)
        if lacking:
            raise EngineSettingsError(f"{setup.model}: {lacking} ({error})") from error
        raise type(error)(f"{setup.model}: {error}") from error
    except (OSError, VLLMServerError) as error:
        raise EngineStartError(f"vLLM did not start {setup.model}: {error}") from error
    client = setup.weight_client(llm, kv) if setup.weight_client else None
    return VLLMEngine(llm, version=setup.version, client=client, shutdown_s=shutdown_s)


class VLLMEngine:
    """A `RolloutEngine` over vLLM; made by `VLLMConfig.build`.

    The prefix cache is salted anew with each load, by the weight client: a request never reuses
    keys and values of other weights than those in use when it was submitted, and one that is
    submitted while the engine stands still for a load none of the weights before.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        *,
        version: int,
        client: WeightClient | None = None,
        shutdown_s: float | None = 10.0,
    ) -> None:
        """Use an engine that runs.

        Args:
            llm: vLLM's, with the ``logprobs_mode`` "processed_logprobs".
            version: of the weights it has, by which vLLM was told to call them.
            client: gives it others.
            shutdown_s: how long its end may take; ``None``: it is somebody else's, and goes on.
        """
        self._llm = llm
        self._version = version
        self._client = client
        self._shutdown_s = shutdown_s
        self._pictures = VLLMPictures(llm)
        self._num_tokens = 0
        self._num_scores = itertools.count()
        self._tasks: set[asyncio.Task[GeneratedSample]] = set()
        self._paused = False
        self._awake = asyncio.Event()
        self._awake.set()
        self._sleeps: SleepPolicy | None = None
        self._loading = asyncio.Lock()
        self._fault: EngineError | None = None
        self._loop = OneLoop("this engine")
        self._loop.check()

    @property
    def weight_version(self) -> int:
        """The version that samples the next token."""
        return self._version

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and response."""
        return int(self._llm.model_config.max_model_len)

    @property
    def num_running(self) -> int:
        """Requests in flight, those that wait for a place included."""
        return len(self._tasks)

    @property
    def num_tokens_generated(self) -> int:
        """Tokens reported by vLLM since the start, ``progress_tokens`` at a time."""
        return self._num_tokens

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[GeneratedSample, None]:
        """Yield the samples as they finish; see `RolloutEngine.generate`."""
        self._raise_fault()
        size = int(self._llm.model_config.get_vocab_size())
        check_requests(requests, context_length=self.context_length, vocabulary_size=size)
        expanded, prompts = await self._pictures.expand(requests)
        self._raise_fault()
        in_flight = names_of(self._tasks)
        checked = check_requests(
            expanded, context_length=self.context_length, vocabulary_size=size, in_flight=in_flight
        )
        sample_one = partial(self._sample, prompts)
        async with aclosing(samples_as_finished(checked, sample_one, self._tasks)) as samples:
            async for sample in samples:
                yield sample

    async def score(
        self, token_ids: Sequence[int], top_k: int, shown: Shown | None = None
    ) -> TeacherScores:
        """Return what the model makes of given tokens; see `TokenScorer.score`."""
        self._raise_fault()
        tokens = [int(token) for token in token_ids]
        scored = GenerationRequest(
            request_id=f"score-{next(self._num_scores)}",
            prompt_token_ids=tuple(tokens),
            sampling=Sampling(temperature=0.0, max_new_tokens=1),
        )
        size = int(self._llm.model_config.get_vocab_size())
        check_request(scored, context_length=self.context_length, vocabulary_size=size)
        prompt = await self._pictures.whole(scored, shown)
        self._raise_fault()
        parameters = SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=top_k
        )
        places: Sequence[Any] = ()
        try:
            async for output in self._llm.generate(prompt, parameters, scored.request_id):
                places = output.prompt_logprobs or places
        except VLLMDeadError as error:
            raise self._dead("vLLM's engine process died") from error
        except VLLMServerError as error:
            raise EngineError(f"{len(tokens)} tokens were not scored by vLLM: {error}") from error
        found = [
            {token: (of.logprob, of.rank or 0) for token, of in place.items()} if place else None
            for place in places
        ]
        return scores_of(tokens, found, top_k=top_k, whom="vLLM")

    async def pause(self) -> None:
        """Freeze every request at the next token boundary, its keys and values kept."""
        self._raise_fault()
        self._paused = True
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Go on."""
        self._raise_fault()
        await self._llm.resume_generation()
        self._paused = False

    async def load_version(self, version: int, endpoints: Sequence[str]) -> LoadReport:
        """Have the weight client fetch and swap; see `RolloutEngine.load_version`."""
        self._raise_fault()
        if self._client is None:
            raise WeightLoadError(f"version {version}: this engine was given no weight client")
        if self._paused:
            raise EnginePausedError(f"version {version}: resume the engine before loading weights")
        if self._sleeps is not None:
            raise EnginePausedError(f"version {version}: wake the engine before loading weights")
        async with self._loading:
            try:
                await self._client.connect(endpoints)
                times = await self._client.load(version)
            except asyncio.CancelledError:
                await carry_through(self._after_cancelled_load(version))
                raise
            except Exception as error:
                await self._after_failed_load(version, error)
                raise WeightLoadError(f"version {version} could not be loaded: {error}") from error
            self._version = times.version
            self._awake.set()
        return LoadReport(version=times.version, transfer_s=times.transfer_s, stall_s=times.stall_s)

    async def sleep(self, weights: SleepPolicy) -> None:
        """Give the device up by vLLM's sleep mode; see `SleepingEngine.sleep`.

        On a CPU, where vLLM has no such mode, keys and values are forgotten and the rest stays.
        """
        self._raise_fault()
        if self._sleeps is not None:
            return
        if weights == "discard" and (self._client is None or self._tasks):
            raise EngineError(
                "weights can only be given up by an engine that has a weight client to fetch them "
                f"again and nothing in flight; {len(self._tasks)} requests are"
            )
        self._awake.clear()
        async with self._loading:
            await self._llm.sleep(level=1 if weights == "keep" else 2, mode="keep")
            self._sleeps = weights

    async def wake(self) -> None:
        """Have the device again; see `SleepingEngine.wake`."""
        self._raise_fault()
        if self._sleeps is None:
            return
        await self._llm.wake_up()  # its scheduler goes on by itself
        if self._paused:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
        kept, self._sleeps = self._sleeps == "keep", None
        if kept:
            self._awake.set()

    async def aclose(self) -> None:
        """Fail what is in flight, then end vLLM's processes within the deadline."""
        if isinstance(self._fault, EngineClosedError):
            return
        self._fault = EngineClosedError("the engine was closed")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._shutdown_s is not None:
            await asyncio.to_thread(self._llm.shutdown, self._shutdown_s)

    async def _sample(self, prompts: Prompts, request: GenerationRequest) -> GeneratedSample:
        parameters = parameters_of(request.sampling, self._pictures.marks)
        if request.images and not self._pictures.share_prefixes:
            parameters.skip_reading_prefix_cache = True
        token_ids: list[int] = []
        logprobs: list[float] = []
        try:
            await self._awake.wait()
            given = prompts.get(request.request_id) or tokens_input(list(request.prompt_token_ids))
            prompt = cast(EngineInput, {**given, "cache_salt": self._salt()})
            async for output in self._llm.generate(prompt, parameters, request.request_id):
                part = output.outputs[0]
                token_ids += part.token_ids
                logprobs += part.logprobs.logprobs  # pyright: ignore  # one per token, flat
                self._num_tokens += len(part.token_ids)
                if output.finished:
                    return sample_of(request, token_ids, logprobs, part)
        except asyncio.CancelledError:
            self._raise_fault()  # cancelled by `aclose`
            raise
        except VLLMDeadError as error:
            raise self._dead("vLLM's engine process died") from error
        except VLLMServerError as error:
            raise EngineError(f"request {request.request_id} failed in vLLM: {error}") from error
        except VLLMClientError as error:
            raise self._pictures.refused(request, error) from error
        raise EngineError(f"ended without a last output: request {request.request_id}")

    async def _after_failed_load(self, version: int, error: Exception) -> None:
        """Find out whether the engine still runs; if not, no later request may use it."""
        if self._llm.errored:
            raise self._dead("vLLM's engine process died while loading weights") from error
        if await self._stands_still():
            raise self._given_up(_HALF_LOADED.format(version)) from error

    async def _after_cancelled_load(self, version: int) -> None:
        """Find out which weights a load left that was given up: its swap may have been carried out.

        vLLM knows, by the label that the client gave them.
        """
        if self._llm.errored:
            self._dead("vLLM's engine process died while loading weights")
        elif await self._stands_still():
            self._given_up(_HALF_LOADED.format(version))
        else:
            label = await self._llm.get_weight_version()
            found = int(label) if label.isdecimal() else self._version
            if found != self._version:
                self._awake.set()
            self._version = found

    def _salt(self) -> str:
        return _NEVER_LOADED if self._client is None else self._client.cache_salt

    async def _stands_still(self) -> bool:
        """Ask whether a load left the engine paused; one that does not answer is given up."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._llm.is_paused()
        except TimeoutError as error:
            raise self._given_up(
                f"vLLM's engine process hangs: no answer for {_ANSWER_S:g} s"
            ) from error

    def _given_up(self, words: str) -> EngineError:
        fault = self._dead(f"{words}; the engine has to be restarted")
        for task in self._tasks:
            task.cancel()  # frozen for ever otherwise; each raises the fault
        return fault

    def _dead(self, words: str) -> EngineError:
        if self._fault is None:
            self._fault = EngineDeadError(words)
        return self._fault

    def _raise_fault(self) -> None:
        self._loop.check()
        if self._fault is not None:
            raise self._fault
