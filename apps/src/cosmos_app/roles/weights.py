"""How weights reach the engines: weightsync's receivers, fitted to what the rollout package asks.

This is the one place where the two packages meet.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cosmos_app.recipe import Recipe, WeightSyncConfig
from cosmos_parallel import HasHfNames, PeftView, carried_weights, is_of_value_head
from cosmos_rollout import KvPolicy
from cosmos_weightsync import (
    ReceiverConfig,
    SenderConfig,
    Shard,
    WeightReceiver,
    converted_shards,
    shards_of,
)
from cosmos_weightsync.encodings import adapter_shards
from cosmos_weightsync.integrations.vllm import EngineBrokenError, LoadTimes, VLLMWeightClient

_MIB = 1 << 20
_GRACE_S = 10.0


def sender_config(config: WeightSyncConfig) -> SenderConfig:
    """Return how a sender serves: receivers give up by themselves before it hangs up on them."""
    return SenderConfig(
        wire_dtype="" if config.quantised else config.wire_dtype,
        bucket_bytes=int(config.bucket_mib * _MIB),
        max_snapshots=config.snapshots,
        read_timeout_s=config.deadline_s + _GRACE_S,
    )


def trained_shards(model: nn.Module, recipe: Recipe) -> tuple[Shard, ...]:
    """Describe what this rank sends: all it holds, in names of the checkpoint, or the adapter."""
    if recipe.model.training.lora is not None:
        return adapter_shards(PeftView(model))
    if isinstance(model, HasHfNames):
        # what a checkpoint has beside what is computed, for engines that start without its files
        carried = converted_shards(carried_weights(model), model.to_hf)
        return (*converted_shards(model, model.to_hf), *carried)
    return shards_of(
        (name, parameter)
        for name, parameter in model.named_parameters()
        if not is_of_value_head(name)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """Named full tensors of one version."""

    version: int
    tensors: Mapping[str, torch.Tensor]


class ReceivedWeights:
    """A ``WeightSource`` for engines of this process: whole tensors, fetched and verified."""

    def __init__(self, config: WeightSyncConfig, token: str = "", *, serve_host: str = "") -> None:
        """Nothing is connected before the first version is asked for.

        Args:
            config: how to fetch.
            token: opens senders, and this one.
            serve_host: where others can fetch what is here; empty for nobody.
        """
        self._config = config
        self._token = token
        self._serve_host = serve_host
        self._endpoints: tuple[str, ...] = ()
        self._receiver: WeightReceiver | None = None
        self._wire_bytes = 0

    @property
    def wire_bytes(self) -> int:
        """Bytes that came from others for the version staged last; 0 before the first."""
        return self._wire_bytes

    def serve(self) -> tuple[str, ...]:
        """Serve from now on what is staged later, if others are to have it; return `endpoints`.

        Raises:
            ConfigurationError: if the address is none of this machine.
        """
        if self._serve_host and self._receiver is None:
            self._receiver = self._made(())
        return self.endpoints

    def stage(self, version: int, endpoints: Sequence[str]) -> Staged:
        """Fetch ``version`` or a newer one; blocking.

        Raises:
            WeightSyncError: if it cannot be had in time.
        """
        receiver = self._receiver
        if receiver is None:
            self._receiver = receiver = self._made(endpoints)
        elif tuple(endpoints) != self._endpoints:
            receiver.connect(endpoints)
        self._endpoints = tuple(endpoints)
        staged = receiver.stage(version, timeout_s=self._config.deadline_s)
        self._wire_bytes = staged.wire_bytes
        tensors = {shard.spec.name: shard.tensor.clone() for shard in receiver.staged_shards()}
        return Staged(version=staged.version, tensors=tensors)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where others can fetch what was staged last; none before `serve` or the first."""
        receiver = self._receiver
        return () if receiver is None or not self._serve_host else (receiver.endpoint,)

    def _made(self, endpoints: Sequence[str]) -> WeightReceiver:
        config = ReceiverConfig(
            transport=self._config.transport,
            bucket_bytes=int(self._config.bucket_mib * _MIB),
            token=self._token,
            serve_host=self._serve_host,
        )
        return WeightReceiver(endpoints=endpoints, config=config)

    def close(self) -> None:
        """Hang up; may be called twice."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def vllm_client(
    config: WeightSyncConfig, engine: Any, kv: KvPolicy, *, token: str = "", serve_host: str = ""
) -> VLLMWeightClient:
    """Return what moves weights into vLLM's workers, which serve them at ``serve_host`` if any."""
    made = VLLMWeightClient if config.staged else _StandingClient
    return made(
        engine,
        kv_cache=kv,
        salted=True,  # as requests of `VLLMConfig` are
        init_info={
            "transport": config.transport,
            "bucket_bytes": int(config.bucket_mib * _MIB),
            "token": token,
            "serve_host": serve_host,
        },
        timeout_s=config.deadline_s,
    )


class CountingClient:
    """A ``WeightClient`` that keeps in mind how many bytes the last load fetched."""

    def __init__(self, inner: VLLMWeightClient) -> None:
        """Nothing is loaded yet; ``inner`` does it."""
        self._inner = inner
        self._wire_bytes = 0

    @property
    def wire_bytes(self) -> int:
        """Bytes that came to the worker that fetched most, for the version loaded last."""
        return self._wire_bytes

    @property
    def cache_salt(self) -> str:
        """That of the client which has the engine swap."""
        return self._inner.cache_salt

    async def connect(self, endpoints: Sequence[str]) -> object:
        """Fetch from these from now on."""
        return await self._inner.connect(endpoints)

    async def load(self, version: int) -> LoadTimes:
        """Fetch, pause, swap and resume; see `VLLMWeightClient.load`."""
        times = await self._inner.load(version)
        self._wire_bytes = times.wire_bytes
        return times


class _StandingClient(VLLMWeightClient):
    """Has its engine stand still while weights are fetched too, and not for the swap alone."""

    def __init__(self, engine: Any, **given: Any) -> None:
        super().__init__(engine, **given)
        self._standing = engine

    async def load(self, version: int = 0) -> LoadTimes:
        began = time.monotonic()
        await self._standing.pause_generation(mode="keep", clear_cache=False)
        try:
            times = await super().load(version)
        except EngineBrokenError:
            raise
        except BaseException:
            await asyncio.shield(self._standing.resume_generation())
            raise
        return replace(times, stall_s=time.monotonic() - began)
