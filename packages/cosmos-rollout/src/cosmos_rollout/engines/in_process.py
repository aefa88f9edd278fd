"""An engine that decodes in this process, one token for every request in flight at a time.

It owns what is the same for any model, scripted or real: queues, stop conditions, versions, pauses
and weight swaps at token boundaries. What a token is comes from a `Decoder`.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar, TypeVarTuple

import numpy as np

from cosmos_core.trajectory import FinishReason
from cosmos_rollout.carried_through import carry_through
from cosmos_rollout.checking import check_requests, refuse_pictures
from cosmos_rollout.engine import (
    GeneratedSample,
    GenerationRequest,
    LoadReport,
    SleepPolicy,
    StagedWeights,
    WeightSource,
    merge_versions,
)
from cosmos_rollout.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EnginePausedError,
    WeightLoadError,
)
from cosmos_rollout.one_loop import OneLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class DecodedToken(NamedTuple):
    """The next token of one request and its log-probability."""

    request_id: str
    token_id: int
    logprob: float


class Decoder(Protocol):
    """Gives every admitted request its next token; only ever called from one thread."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and response."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        ...

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Start these requests with the next step."""
        ...

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these requests: they are finished, or nobody wants them."""
        ...

    def step(self) -> Sequence[DecodedToken]:
        """Sample one token for each admitted request."""
        ...

    def load(self, staged: StagedWeights) -> None:
        """Put new weights in place, all or nothing; the next step uses them."""
        ...

    def sleep(self, weights: SleepPolicy) -> None:
        """Give up keys and values; keep the weights in host memory, or give them up too."""
        ...

    def wake(self) -> None:
        """Have the memory again; weights that were given up come with `load`."""
        ...


@dataclass(slots=True)
class _Running:
    request: GenerationRequest
    inbox: "asyncio.Queue[GeneratedSample | EngineError]"
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])

    def add(self, token: DecodedToken, version: int) -> FinishReason | None:
        self.token_ids.append(token.token_id)
        self.logprobs.append(token.logprob)
        self.versions.append(version)
        sampling = self.request.sampling
        if token.token_id in sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= sampling.max_new_tokens else None

    def sample(self, finish_reason: FinishReason) -> GeneratedSample:
        return GeneratedSample(
            request_id=self.request.request_id,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=merge_versions(self.versions),
            finish_reason=finish_reason,
        )


class InProcessEngine:
    """A `RolloutEngine` over a `Decoder`.

    One asyncio task steps the decoder in one worker thread while anything is in flight. It holds
    ``_boundary`` during a step, so whoever gets that lock stands at a token boundary.

    Args:
        decoder: gives the tokens.
        version: weight version the decoder starts with.
        source: where `load_version` gets weights; None if they never change.
        max_running: requests decoded at once; more wait their turn.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        version: int = 0,
        source: WeightSource | None = None,
        max_running: int = 64,
    ) -> None:
        self._decoder = decoder
        self._version = version
        self._source = source
        self._max_running = max_running
        self._waiting: deque[_Running] = deque()
        self._running: dict[str, _Running] = {}
        self._released: list[str] = []
        self._num_tokens = 0
        self._loop = OneLoop("this engine")
        self._gate = asyncio.Event()
        self._gate.set()
        self._awake = asyncio.Event()
        self._awake.set()
        self._sleeps: SleepPolicy | None = None
        self._staging: asyncio.Future[StagedWeights] | None = None
        self._boundary = asyncio.Lock()
        self._loading = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decoder")
        self._driver: asyncio.Task[None] | None = None
        self._fault: EngineError | None = None

    @property
    def weight_version(self) -> int:
        """The version that samples the next token."""
        return self._version

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and response."""
        return self._decoder.context_length

    @property
    def num_running(self) -> int:
        """Requests in flight, waiting ones included."""
        return len(self._running) + len(self._waiting)

    @property
    def num_tokens_generated(self) -> int:
        """Tokens sampled since the start."""
        return self._num_tokens

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[GeneratedSample, None]:
        """Yield the samples as they finish; see `RolloutEngine.generate`."""
        self._raise_fault()
        refuse_pictures(requests, type(self._decoder).__name__)
        checked = check_requests(
            requests,
            context_length=self._decoder.context_length,
            vocabulary_size=self._decoder.vocabulary_size,
            in_flight={*self._running, *(entry.request.request_id for entry in self._waiting)},
        )
        inbox: asyncio.Queue[GeneratedSample | EngineError] = asyncio.Queue()
        self._waiting.extend(_Running(request, inbox) for request in checked)
        self._wake()
        try:
            for _ in checked:
                outcome = await inbox.get()
                if isinstance(outcome, EngineError):
                    raise outcome
                yield outcome
        finally:
            self._abandon(inbox)

    async def pause(self) -> None:
        """Stop at the next token boundary."""
        self._raise_fault()
        self._gate.clear()
        async with self._boundary:  # a step in progress ends first
            pass

    async def resume(self) -> None:
        """Go on."""
        self._raise_fault()
        self._gate.set()

    async def load_version(self, version: int, endpoints: Sequence[str]) -> LoadReport:
        """Fetch in a thread while decoding, swap between two steps."""
        self._raise_fault()
        if self._source is None:
            raise WeightLoadError(f"version {version}: this engine was given no weight source")
        if not self._gate.is_set():
            raise EnginePausedError(f"version {version}: resume the engine before loading weights")
        if self._sleeps is not None:
            raise EnginePausedError(f"version {version}: wake the engine before loading weights")
        async with self._loading:
            if self._staging is not None:  # of a load that was cancelled
                await asyncio.wait([self._staging])
            started = time.perf_counter()
            fetched = asyncio.to_thread(self._source.stage, version, endpoints)
            self._staging = asyncio.ensure_future(fetched)
            self._staging.add_done_callback(_look_at_error)
            try:
                staged = await asyncio.shield(self._staging)
            except Exception as error:
                raise WeightLoadError(f"version {version} could not be fetched: {error}") from error
            transfer_s = time.perf_counter() - started
            stall_s = await carry_through(self._swap(staged))
        return LoadReport(version=staged.version, transfer_s=transfer_s, stall_s=stall_s)

    async def _swap(self, staged: StagedWeights) -> float:
        """Put weights in place at a token boundary; return how long that took."""
        async with self._boundary:
            stopped = time.perf_counter()
            try:
                await self._in_thread(self._decoder.load, staged)
            except WeightLoadError:
                raise
            except Exception as error:
                raise WeightLoadError(
                    f"version {staged.version} could not be put in place: {error!r}"
                ) from error
            self._version = staged.version
            self._awake.set()
            return time.perf_counter() - stopped

    async def sleep(self, weights: SleepPolicy) -> None:
        """Give the device up; see `SleepingEngine.sleep`."""
        self._raise_fault()
        if self._sleeps is not None:
            return
        if weights == "discard" and self._source is None:
            raise EngineError("weights that are given up need a weight source to come back from")
        self._awake.clear()
        async with self._loading, self._boundary:
            await self._in_thread(self._decoder.sleep, weights)
            self._sleeps = weights

    async def wake(self) -> None:
        """Have the device again; see `SleepingEngine.wake`."""
        self._raise_fault()
        if self._sleeps is None:
            return
        async with self._boundary:
            await self._in_thread(self._decoder.wake)
            kept, self._sleeps = self._sleeps == "keep", None
        if kept:
            self._awake.set()

    async def aclose(self) -> None:
        """Fail what is in flight and end the worker thread after the step in hand."""
        if self._fault is None:
            self._fail(EngineClosedError("the engine was closed"))
        driver, self._driver = self._driver, None
        if driver is not None and not driver.done():
            self._gate.set()
            self._awake.set()
            await asyncio.wait([driver])
        await asyncio.to_thread(self._thread.shutdown)

    def _wake(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive(), name="decoder")
            self._driver.add_done_callback(self._driver_ended)

    async def _drive(self) -> None:
        while self._fault is None and self.num_running:
            await self._gate.wait()
            await self._awake.wait()
            async with self._boundary:
                if self._gate.is_set() and self._awake.is_set() and self._fault is None:
                    self._record(await self._in_thread(self._step, self._release(), self._admit()))

    def _driver_ended(self, driver: "asyncio.Task[None]") -> None:
        error = None if driver.cancelled() else driver.exception()
        if error is not None:
            fault = EngineDeadError(f"the decoder failed: {error!r}")
            fault.__cause__ = error
            self._fail(fault)

    def _release(self) -> list[str]:
        released, self._released = self._released, []
        return released

    def _admit(self) -> list[GenerationRequest]:
        room = min(self._max_running - len(self._running), len(self._waiting))
        admitted = [self._waiting.popleft() for _ in range(room)]
        self._running.update((entry.request.request_id, entry) for entry in admitted)
        return [entry.request for entry in admitted]

    def _step(
        self, released: Sequence[str], admitted: Sequence[GenerationRequest]
    ) -> Sequence[DecodedToken]:
        self._decoder.release(released)
        self._decoder.admit(admitted)
        return self._decoder.step()

    def _record(self, tokens: Sequence[DecodedToken]) -> None:
        for token in tokens:
            entry = self._running.get(token.request_id)
            if entry is None:  # abandoned during the step
                continue
            self._num_tokens += 1
            reason = entry.add(token, self._version)
            if reason is not None:
                self._finish(token.request_id)
                entry.inbox.put_nowait(entry.sample(reason))

    def _finish(self, request_id: str) -> None:
        del self._running[request_id]
        self._released.append(request_id)

    def _abandon(self, inbox: "asyncio.Queue[GeneratedSample | EngineError]") -> None:
        self._waiting = deque(entry for entry in self._waiting if entry.inbox is not inbox)
        for request_id in [key for key, entry in self._running.items() if entry.inbox is inbox]:
            self._finish(request_id)

    def _fail(self, fault: EngineError) -> None:
        self._fault = fault
        entries = [*self._waiting, *self._running.values()]
        for inbox in {id(entry.inbox): entry.inbox for entry in entries}.values():
            inbox.put_nowait(fault)
        self._waiting.clear()
        self._running.clear()

    def _raise_fault(self) -> None:
        self._loop.check()
        if self._fault is not None:
            raise self._fault

    async def _in_thread(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)


def _look_at_error(fetched: "asyncio.Future[StagedWeights]") -> None:
    """Have asyncio not complain of an error that nobody waits for any more."""
    if not fetched.cancelled():
        fetched.exception()
