"""For users of vLLM: backend ``"cosmos"`` of its weight-transfer interface, and a client for it.

```python
engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=path, **engine_arguments()))
client = VLLMWeightClient(engine)
await client.connect(endpoints)          # of every sender rank; again after a trainer restart
times = await client.load(7)             # generation stalls for the commit, not for the transfer
```
A load runs as follows; requests in flight go on under the new weights:

```
stage (background thread of each worker, engine generates) ─► pause at a token boundary
─► start_weight_update ─► update_weights (commit) ─► finish_weight_update(version) ─► resume
```
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, TypeVar

from cosmos_weightsync import errors
from cosmos_weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    TransferError,
    VersionError,
    WeightSyncError,
)
from cosmos_weightsync.integrations.amx import ask_for_amx
from cosmos_weightsync.integrations.cancelling import carry_through
from cosmos_weightsync.integrations.vllm_worker import WorkerExtension
from cosmos_weightsync.settings import check_choice
from cosmos_weightsync.versions import version_number

__all__ = [
    "BACKEND",
    "EngineBrokenError",
    "LoadTimes",
    "VLLMWeightClient",
    "engine_arguments",
    "register",
]

BACKEND = "cosmos"
Cached = Literal["recompute", "keep"]

T = TypeVar("T")


class EngineBrokenError(WeightSyncError):
    """The engine must be restarted: it hangs, or a commit failed half-way and left it paused."""


def register() -> None:
    """Make ``WeightTransferConfig(backend="cosmos")`` known to vLLM. May be repeated.

    vLLM calls this by itself in each of its processes, through the entry point group
    ``vllm.general_plugins``.
    """
    from vllm.distributed.weight_transfer import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    package = __name__.rpartition(".")[0]
    for factory, module, name in (
        (WeightTransferEngineFactory, "vllm_engine", "CosmosWeightTransferEngine"),
        (WeightTransferTrainerFactory, "vllm_trainer", "CosmosTrainerWeightTransferEngine"),
    ):
        if BACKEND not in factory._registry:  # pyright: ignore[reportPrivateUsage]
            factory.register_engine(BACKEND, f"{package}.{module}", name)
    ask_for_amx()


def engine_arguments() -> dict[str, Any]:
    """The arguments of ``AsyncEngineArgs`` (or ``LLM``) that switch weight transfer on."""
    from vllm.config.weight_transfer import WeightTransferConfig

    register()
    return {
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
    }


class AsyncEngine(Protocol):
    """What `VLLMWeightClient` uses of vLLM's ``AsyncLLM``."""

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = ...,  # noqa: ASYNC109 - vLLM's signature
        args: tuple[Any, ...] = ...,
    ) -> list[Any]: ...
    @property
    def model_config(self) -> Any: ...  # vLLM's
    @property
    def vllm_config(self) -> Any: ...  # vLLM's
    async def pause_generation(self, *, mode: Any = ..., clear_cache: bool = ...) -> None: ...
    async def reset_encoder_cache(self) -> None: ...
    async def resume_generation(self) -> None: ...
    async def init_weight_transfer_engine(self, request: Any) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def update_weights(self, request: Any) -> None: ...
    async def finish_weight_update(self, weight_version: str | None = ...) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """One load.

    Attributes:
        version: The version in use now; it may be newer than the one asked for.
        transfer_s: Staging, with generation going on.
        stall_s: From asking for the pause, which the step under way ends first, to the return of
            resume; with ``"recompute"`` what is in flight is prefilled after it.
        num_bytes: What the worker that needs most has of it.
        wire_bytes: What crossed to the worker that fetched most; less with ``reuse``.
    """

    version: int
    transfer_s: float
    stall_s: float
    num_bytes: int
    wire_bytes: int


class VLLMWeightClient:
    """Loads versions into a vLLM engine that was made with `engine_arguments`.

    Args:
        engine: An ``AsyncLLM``.
        kv_cache: What becomes of the keys and values that the old weights computed for requests
            in flight: ``"recompute"`` them under the new weights, or ``"keep"`` them. What they
            made of pictures, which vLLM keeps for later requests, is forgotten either way.
        init_info: More fields of the engine's `InitInfo`: ``transport``, ``token``, ``reuse``,
            ``bucket_bytes``, ``serve_host``, ``stall_s`` and so on, as in `ReceiverConfig`.
        timeout_s: How long a staging may take, and a commit.
        answer_s: An engine hangs that has not said for so long how its staging goes.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        kv_cache: Cached = "recompute",
        salted: bool = False,
        init_info: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        answer_s: float = 60.0,
    ) -> None:
        """Use an engine; nothing is sent yet.

        Raises:
            ConfigurationError: if new requests would go on with keys and values of old weights, or
                ``kv_cache`` is another word.
        """
        check_choice("kv_cache", kv_cache, Cached)
        if kv_cache == "keep" and not salted and _caches_prefixes(engine):
            raise ConfigurationError(
                "with kv_cache='keep' this engine's prefix cache would give keys and values of old "
                "weights to new requests: give each request cache_salt=client.cache_salt and say "
                "salted=True, or make the engine with enable_prefix_caching=False, or use "
                "kv_cache='recompute'"
            )
        self._engine = engine
        self._name = uuid.uuid4().hex[:8]  # another client may have given salts before
        self._num_loads = 0
        self._clear_cache = kv_cache == "recompute"
        self._init_info = dict(init_info or {})
        self._timeout_s = timeout_s
        self._answer_s = min(answer_s, timeout_s)
        self._endpoints: tuple[str, ...] = ()
        self._reports: tuple[str, ...] = ()
        self._served_at: tuple[str, ...] = ()
        self._lock = asyncio.Lock()

    @property
    def cache_salt(self) -> str:
        """What a request is given now, as ``{"prompt_token_ids": ..., "cache_salt": ...}``.

        Another one with each load, from when the engine stands still for it: prefixes are shared
        only by requests of the same weights, and what is asked meanwhile is of the new ones.
        """
        return f"{BACKEND}-{self._name}-{self._num_loads}"

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where other engines can fetch the version loaded last: `connect` them to all of these.

        One per worker; none before the first load or `serve`, and without ``serve_host`` in
        ``init_info``.
        """
        return self._served_at

    async def serve(self) -> Sequence[str]:
        """Have the workers serve from now on what they load later; returns `endpoints`.

        Engines that are connected to them wait for it: all can be sent their first version in the
        same moment, some by others. See `describe_by`.

        Raises:
            ConfigurationError: ``init_info`` has no ``serve_host``, or makes no sense; or the
                engine was made without `engine_arguments`.
            EngineBrokenError: the engine hangs.
        """
        _check_init_info(self._init_info)
        if not self._init_info.get("serve_host"):
            raise ConfigurationError("set serve_host in init_info for this engine to serve")
        answers = await self._asked("cosmos_serve", self._init_info)
        _raise_failure(answers, "nothing can be served")
        self._served_at = tuple(str(answer["endpoint"]) for answer in answers)
        return self._served_at

    def describe_by(self, endpoints: Sequence[str]) -> None:
        """Have workers ask these, the first time, what tensors there are.

        Those that they are connected to cannot tell before they have their own first version.
        """
        self._init_info["described_by"] = _listed(endpoints)

    async def connect(self, endpoints: Sequence[str]) -> Sequence[str]:
        """Use these senders from now on; of no effect if they are the ones in use.

        The workers ask the senders what they have and find out, by their model's own loader,
        which slices of it they need. The engine serves on meanwhile, and after a failure too.

        Returns:
            A report of each worker: which tensors could not be followed, for instance.

        Raises:
            UnknownTensorError: the senders' tensors are not those of the engine's model.
            TransferError: the senders cannot be reached.
            EngineBrokenError: the engine hangs.
            ConfigurationError: the engine was made without `engine_arguments`, or ``init_info``
                makes no sense.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if tuple(endpoints) == self._endpoints:
            return self._reports
        info = {**self._init_info, "endpoints": _listed(endpoints), "describe": "background"}
        _check_init_info(info)
        async with self._lock:
            deadline = time.monotonic() + self._timeout_s
            await self._until_settled(deadline)  # A load that was cancelled may still be staging.
            self._endpoints = ()
            request = WeightTransferInitRequest(init_info=info)
            await self._answered(self._engine.init_weight_transfer_engine(request), self._timeout_s)
            _raise_failure(await self._until_settled(deadline), "asking the senders failed")
            found = await self._answered(
                self._engine.collective_rpc("cosmos_discover"), self._timeout_s
            )
            _raise_failure(found, "the senders' tensors do not fit")
            self._reports = tuple(str(one["report"]) for one in found)
            self._endpoints = tuple(endpoints)
            return self._reports

    async def load(self, version: int = 0) -> LoadTimes:
        """Stage a version while the engine generates, then pause, commit and resume.

        Args:
            version: The oldest version that will do.

        Raises:
            TransferError: staging failed; the engine goes on with the weights it has.
            EngineBrokenError: the commit failed, and the engine stays paused; or it hangs.
            VersionError: nothing is connected, or the version is no whole number.
        """
        version = version_number(version)
        if not self._endpoints:
            raise VersionError("'connect' to the senders first")
        async with self._lock:
            started = time.monotonic()
            staged, num_bytes, wire_bytes = await self._stage(version)
            transfer_s = time.monotonic() - started
            # Given up half-way, it would leave the engine paused.
            commit = self._answered(self._commit(staged), self._timeout_s)
            stall_s = await carry_through(commit)
            return LoadTimes(staged, transfer_s, stall_s, num_bytes, wire_bytes)

    async def _stage(self, version: int) -> tuple[int, int, int]:
        """Until every worker has staged the same version; with its sizes."""
        deadline = time.monotonic() + self._timeout_s
        await self._until_settled(deadline)  # A load that was cancelled may still be staging.
        while True:
            left = deadline - time.monotonic()
            await self._asked("cosmos_stage", version, left)
            states = await self._until_staged(deadline)
            versions = [int(state["version"]) for state in states]
            if min(versions) == max(versions):
                self._served_at = tuple(filter(None, (str(s["endpoint"]) for s in states)))
                return versions[0], _largest(states, "num_bytes"), _largest(states, "wire_bytes")
            version = max(versions)  # Published in between; the workers behind fetch it too.

    async def _until_staged(self, deadline: float) -> list[dict[str, Any]]:
        states = await self._until_settled(deadline)
        _raise_failure(states, "staging failed")
        for rank, state in enumerate(states):
            if state["state"] != "staged":
                raise TransferError(f"staging failed: worker {rank} is {state['state']}")
        return states

    async def _until_settled(self, deadline: float) -> list[dict[str, Any]]:
        """Wait until no worker is staging."""
        pause_s = 0.002
        while True:
            states = await self._asked("cosmos_staged")
            running = [rank for rank, state in enumerate(states) if state["state"] == "running"]
            if not running:
                return states
            if time.monotonic() > deadline:
                whose = f"of {len(states)} workers, those of ranks {running}"
                raise DeadlineError(f"{whose} staged nothing in {self._timeout_s} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)

    async def _asked(self, method: str, *args: object) -> list[Any]:
        """Call what workers with the extension have."""
        try:
            called = self._engine.collective_rpc(method, None, args)
            return await self._answered(called, self._answer_s)
        except Exception as error:
            if method not in str(error):
                raise
            raise ConfigurationError(
                "the engine's workers lack cosmos_weightsync's extension: make the engine with "
                "AsyncEngineArgs(..., **engine_arguments())"
            ) from error

    async def _answered(self, answer: Awaitable[T], within_s: float) -> T:
        """Wait for the engine, but not for ever: its process may hang, and lives then."""
        waiting = asyncio.timeout(within_s)
        try:
            async with waiting:
                return await answer
        except TimeoutError as error:
            if not waiting.expired():
                raise
            raise EngineBrokenError(
                f"the engine hangs: no answer for {within_s:g} s; end it and start another"
            ) from error

    async def _commit(self, version: int) -> float:
        """Pause, swap, resume; returns how long that took."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        started = time.monotonic()
        await self._engine.pause_generation(mode="keep", clear_cache=self._clear_cache)
        self._num_loads += 1
        try:
            await self._engine.start_weight_update()
            await self._engine.update_weights(
                WeightTransferUpdateRequest(update_info={"version": version})
            )
            await self._engine.finish_weight_update(weight_version=str(version))
            if not self._clear_cache and self._engine.model_config.is_multimodal_model:
                # What the old weights made of a picture is kept by the picture, for any request.
                await self._engine.reset_encoder_cache()
        except Exception as error:
            raise EngineBrokenError(
                f"committing version {version} failed and left the engine between two versions; "
                f"it stays paused: {error}"
            ) from error
        await self._engine.resume_generation()
        return time.monotonic() - started


def _caches_prefixes(engine: AsyncEngine) -> bool:
    return bool(engine.vllm_config.cache_config.enable_prefix_caching)


def _listed(endpoints: Sequence[str]) -> Sequence[str]:
    """A list that is nobody else's; one string in place of several is left to be refused."""
    return endpoints if isinstance(endpoints, str) else list(endpoints)


def _check_init_info(info: Mapping[str, Any]) -> None:
    """Say here, and in our own words, what the workers would refuse."""
    from cosmos_weightsync.integrations.vllm_infos import InitInfo

    unknown = sorted(set(info) - {one.name for one in fields(InitInfo)})
    if unknown:
        raise ConfigurationError(f"init_info has no {unknown[0]!r}; see InitInfo")
    InitInfo(**info).receiver_config()


def _largest(states: Sequence[Mapping[str, Any]], key: str) -> int:
    return max(int(state[key]) for state in states)


def _raise_failure(states: Sequence[Mapping[str, Any]], what: str) -> None:
    """Raise the first failure that a worker reports, as the error that it was there."""
    for state in states:
        if state["state"] == "failed":
            kind = getattr(errors, state["kind"], TransferError)
            raise kind(f"{what}: {state['error']}")
