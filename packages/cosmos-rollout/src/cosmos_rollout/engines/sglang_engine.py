"""The SGLang engine: its server over loopback, token ids in and out, as a `RolloutEngine`.

A weight version is fetched by this process, written as a checkpoint into memory, and read by the
server between two tokens of whatever it generates::

    stage ─► safetensors in /dev/shm ─► pause_generation ─► update_weights_from_disk ─► continue
    (generation goes on)                └──────────────────── the stall ────────────────────┘

What SGLang gives less than others: seeds count under deterministic inference alone; with top-p
below 1 its log-probs are those of the whole softmax, so that such requests are refused; where a
request has stop tokens, the model's own end ends it too; it keeps a few tokens of the context for
itself; and a pause is over the wire, so that a token sampled before it may still arrive after it.
"""

import asyncio
import itertools
import json
import os
import shutil
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from transformers import AutoConfig

from cosmos_core.trajectory import VersionSpan
from cosmos_rollout.carried_through import carry_through
from cosmos_rollout.checking import check_requests, refuse_pictures
from cosmos_rollout.engine import (
    GeneratedSample,
    GenerationRequest,
    LoadReport,
    StagedWeights,
    WeightSource,
)
from cosmos_rollout.engines.setup import EngineSetup
from cosmos_rollout.engines.sglang_server import ServerUse, SGLangServer, own_folder, start_server
from cosmos_rollout.engines.tasks import names_of, samples_as_finished
from cosmos_rollout.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EnginePausedError,
    PromptError,
    WeightLoadError,
)
from cosmos_rollout.one_loop import OneLoop


async def start_sglang_engine(use: ServerUse, setup: EngineSetup) -> "SGLangEngine":
    """Start the server and wait until it answers.

    Raises:
        EngineStartError: with the end of what it wrote.
    """
    async with AsyncExitStack() as ended:
        folder = Path(ended.enter_context(own_folder()))
        server = await start_server(use, folder)
        ended.push_async_callback(server.end, use.shutdown_s)
        client = httpx.AsyncClient(
            base_url=server.url,
            headers=server.headers,
            timeout=use.request_s,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # no proxy from the environment
        )
        await ended.enter_async_context(client)
        await server.listening(client, use.start_s)
        said = (await client.get("/server_info")).json()
        # Any: of its own class in each model; that of words within one that sees
        config: Any = await asyncio.to_thread(AutoConfig.from_pretrained, setup.model)
        size = config.get_text_config().vocab_size
        length = int(said["max_req_input_len"]) + 1
        return SGLangEngine(
            use,
            server,
            client,
            setup=setup,
            limits=(length, int(size)),
            ended=ended.pop_all(),
        )


class SGLangEngine:
    """A `RolloutEngine` over SGLang; made by `SGLangConfig.build`."""

    def __init__(
        self,
        use: ServerUse,
        server: SGLangServer,
        client: httpx.AsyncClient,
        *,
        setup: EngineSetup,
        limits: tuple[int, int],
        ended: AsyncExitStack,
    ) -> None:
        """Use a server that answers.

        Args:
            use: how it is spoken to.
            server: the process.
            client: talks to it.
            setup: model, version, and where weights come from.
            limits: context length and vocabulary size.
            ended: what to close in the end.
        """
        self._use = use
        self._server = server
        self._client = client
        self._model = setup.model
        self._source: WeightSource | None = setup.weight_source
        self._version = setup.version
        self._context_length, self._vocabulary_size = limits
        self._ended = ended
        self._names = itertools.count()
        self._salts = itertools.count(1)
        self._salt = 0
        self._num_tokens = 0
        self._tasks: set[asyncio.Task[GeneratedSample]] = set()
        self._loading = asyncio.Lock()
        self._paused = False
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
        """Yield the samples as they finish; see `RolloutEngine.generate`.

        Raises:
            PromptError: also for ``top_p`` below 1, whose log-probs SGLang does not tell.
        """
        self._raise_fault()
        refuse_pictures(requests, "SGLang here")
        checked = check_requests(
            requests,
            context_length=self._context_length,
            vocabulary_size=self._vocabulary_size,
            in_flight=names_of(self._tasks),
        )
        for request in checked:
            if request.sampling.top_p < 1.0:
                raise PromptError(f"request {request.request_id}: SGLang needs top_p = 1 here")
        async with aclosing(samples_as_finished(checked, self._sample, self._tasks)) as samples:
            async for sample in samples:
                yield sample

    async def pause(self) -> None:
        """Freeze every request at the next token boundary, its keys and values kept."""
        self._raise_fault()
        self._paused = True
        await self._stop("in_place")

    async def resume(self) -> None:
        """Go on."""
        self._raise_fault()
        await self._ask("/continue_generation", {})
        self._paused = False

    async def load_version(self, version: int, endpoints: Sequence[str]) -> LoadReport:
        """Fetch while generating, then swap between two tokens; see `RolloutEngine`."""
        self._raise_fault()
        if self._source is None:
            raise WeightLoadError(f"version {version}: this engine was given no weight source")
        if self._paused:
            raise EnginePausedError(f"version {version}: resume the engine before loading weights")
        async with self._loading:
            begun = time.monotonic()
            target = self._server.folder / f"version-{version}"
            try:
                staged = await asyncio.to_thread(self._source.stage, version, endpoints)
                await asyncio.to_thread(_write_checkpoint, self._model, staged, target)
                transfer_s = time.monotonic() - begun
                stall_s = await carry_through(self._swap(staged.version, target))
            except EngineDeadError:
                raise
            except Exception as error:
                raise WeightLoadError(f"version {version} could not be loaded: {error}") from error
            finally:
                shutil.rmtree(target, ignore_errors=True)
        return LoadReport(version=staged.version, transfer_s=transfer_s, stall_s=stall_s)

    async def aclose(self) -> None:
        """Fail what is in flight, then end the server within the deadline."""
        if isinstance(self._fault, EngineClosedError):
            return
        self._fault = EngineClosedError("the engine was closed")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._ended.aclose()

    async def _swap(self, version: int, checkpoint: Path) -> float:
        keeps = self._use.kv == "keep"
        begun = time.monotonic()
        await self._stop("in_place" if keeps else "retract")
        self._salt = next(self._salts)  # what is asked from here on begins with the new weights
        try:
            told = await self._ask(
                "/update_weights_from_disk",
                {
                    "model_path": str(checkpoint),
                    "weight_version": str(version),
                    "flush_cache": not keeps,
                },
            )
            if not told.get("success"):
                raise WeightLoadError(str(told.get("message")))
            self._version = version
        finally:
            await self._ask("/continue_generation", {})
        return time.monotonic() - begun

    async def _stop(self, mode: str) -> None:
        await self._ask("/pause_generation", {"mode": mode})
        # The answer comes before the scheduler has heard of it; what it says next comes after.
        await self._client.get("/server_info")

    async def _ask(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        try:
            response = await self._client.post(path, json=body)
        except httpx.HTTPError as error:
            raise self._failed(f"{path} failed: {error!r}") from error
        try:
            said = response.json()
        except ValueError:
            said = {"message": response.text[:500]}
        if response.is_error and "success" not in said:
            raise EngineError(f"SGLang answered {response.status_code} to {path}: {said}")
        return said if isinstance(said, dict) else {}

    async def _sample(self, request: GenerationRequest) -> GeneratedSample:
        token_ids: list[int] = []
        logprobs: list[float] = []
        try:
            async with aclosing(self._events(request)) as events:
                async for event in events:
                    meta = event["meta_info"]
                    new = event.get("output_ids") or []
                    token_ids += new
                    logprobs += [entry[0] for entry in meta.get("output_token_logprobs") or []]
                    self._num_tokens += len(new)
                    if meta.get("finish_reason"):
                        return _finished(request.request_id, token_ids, logprobs, meta)
        except asyncio.CancelledError:
            self._raise_fault()  # cancelled by `aclose`
            raise
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise self._failed(f"request {request.request_id} failed: {error!r}") from error
        raise self._failed(f"ended without a last token: request {request.request_id}")

    async def _events(self, request: GenerationRequest) -> AsyncGenerator[dict[str, Any], None]:
        sampling = request.sampling
        body = {
            "rid": f"{request.request_id}#{next(self._names)}",
            "input_ids": list(request.prompt_token_ids),
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_new_tokens": sampling.max_new_tokens,
                "stop_token_ids": list(sampling.stop_token_ids),
                "sampling_seed": sampling.seed % (1 << 62),
                # without, the model's own end counts as well; with, the request's would not
                "ignore_eos": not sampling.stop_token_ids,
            },
            "return_logprob": True,
            "stream": True,
            # keys and values are shared by requests of one version alone
            "extra_key": str(self._salt),
        }
        async with self._client.stream("POST", "/generate", json=body) as response:
            if response.is_error:
                text = (await response.aread()).decode(errors="replace")
                raise EngineError(f"SGLang answered {response.status_code}: {text[:500]}")
            async for line in response.aiter_lines():
                kind, _, data = line.partition(":")
                if kind == "data" and data.strip() != "[DONE]":
                    event = json.loads(data)
                    if event.get("error"):
                        raise EngineError(f"SGLang failed: {event['error']}")
                    yield event

    def _failed(self, words: str) -> EngineError:
        if self._fault is None and not self._server.is_alive:
            self._fault = EngineDeadError(f"SGLang's process ended:\n{self._server.last_words()}")
        return self._fault or EngineError(words)

    def _raise_fault(self) -> None:
        self._loop.check()
        if self._fault is not None:
            raise self._fault


def _finished(
    request_id: str, token_ids: list[int], logprobs: list[float], meta: Mapping[str, Any]
) -> GeneratedSample:
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length"):
        raise EngineError(f"ended with {meta['finish_reason']}: request {request_id}")
    if not token_ids or len(token_ids) != len(logprobs):
        raise EngineError(
            f"request {request_id}: SGLang gave {len(token_ids)} tokens, {len(logprobs)} log-probs"
        )
    told = meta.get("weight_versions")
    spans = (
        tuple(VersionSpan(int(span["version"]), span["end"] - span["start"]) for span in told)
        if told
        else (VersionSpan(int(meta["weight_version"]), len(token_ids)),)
    )
    return GeneratedSample(
        request_id=request_id,
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=tuple(span for span in spans if span.length),
        finish_reason=reason,
    )


def _write_checkpoint(model: Path, staged: StagedWeights, target: Path) -> None:
    """Write tensors beside links to the model's other files."""
    from safetensors.torch import save_file

    target.mkdir()
    for file in model.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            os.symlink(file.resolve(), target / file.name)
    tensors = {name: tensor.contiguous() for name, tensor in staged.tensors.items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
