"""How adapters reach the engines: alone over the network, added to the weights where they arrive.

Any engine serves them, whether or not it knows adapters; it sees whole weights of its own host::

    policy ──adapter──► rollout process: W + s B A ──shared memory──► workers of vLLM
                                           └──────────► an engine of this process
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from cosmos_app.recipe import WeightSyncConfig
from cosmos_app.roles.quantised import quantised_shards
from cosmos_app.roles.weights import ReceivedWeights, Staged, sender_config
from cosmos_parallel import load_weights, merged_weights, names_in_files
from cosmos_rollout import WeightClient
from cosmos_weightsync import WeightSender, shards_of
from cosmos_weightsync.encodings.selection import ADAPTER_CONFIG


class MergedWeights:
    """A ``WeightSource`` for engines of this process: the base with the newest adapter added."""

    def __init__(self, config: WeightSyncConfig, base: Path, token: str = "") -> None:
        """Nothing is read or connected before the first version is asked for.

        Args:
            config: how adapters travel.
            base: the model directory that the adapters belong to.
            token: opens the senders of adapters.
        """
        self._adapters = ReceivedWeights(config, token)
        self._path = base
        self._base: dict[str, Tensor] = {}
        self._names: dict[str, str] = {}

    @property
    def wire_bytes(self) -> int:
        """Bytes that came from others for the version staged last: those of its adapter."""
        return self._adapters.wire_bytes

    def stage(self, version: int, endpoints: Sequence[str]) -> Staged:
        """Fetch the adapter of ``version`` or a newer one and add it; blocking.

        Raises:
            WeightSyncError: if it cannot be had in time.
            AdapterError: if it does not fit the base.
        """
        staged = self._adapters.stage(version, endpoints)
        adapter = dict(staged.tensors)
        config = json.loads(bytes(adapter.pop(ADAPTER_CONFIG).tolist()))
        if not self._base:
            self._base = load_weights(self._path)
            self._names = names_in_files(self._path)
        merged = merged_weights(self._base, adapter, config, self._names)
        return Staged(version=staged.version, tensors={**self._base, **merged})

    def close(self) -> None:
        """Hang up."""
        self._adapters.close()


@dataclass(frozen=True, slots=True)
class MergeTimes:
    """One load; see ``LoadTimes`` of the rollout package.

    Attributes:
        version: now in use.
        transfer_s: fetching, adding, and handing over, generation going on.
        stall_s: generation stood still.
    """

    version: int
    transfer_s: float
    stall_s: float


class MergingClient:
    """A ``WeightClient`` that hands whole weights to another one, on this host.

    The workers of the engine fetch from a sender in this process, which publishes a version as
    soon as it is merged. A version that the engine gave up while it slept is there for it still.
    """

    def __init__(
        self, inner: WeightClient, weights: MergedWeights, config: WeightSyncConfig
    ) -> None:
        """Nothing is connected yet.

        Args:
            inner: moves whole weights into the engine.
            weights: where they come from.
            config: how they travel on this host.
        """
        self._inner = inner
        self._weights = weights
        self._config = config
        self._endpoints: tuple[str, ...] = ()
        self._whole: dict[str, Tensor] = {}
        self._sender: WeightSender | None = None

    @property
    def cache_salt(self) -> str:
        """That of the client which has the engine swap."""
        return self._inner.cache_salt

    async def connect(self, endpoints: Sequence[str]) -> object:
        """Fetch adapters from these from now on; versions may begin anew with other endpoints."""
        if tuple(endpoints) != self._endpoints:
            self.close()
            self._endpoints = tuple(endpoints)
        return None

    async def load(self, version: int) -> MergeTimes:
        """Fetch, add, publish on this host, and have the engine swap.

        Raises:
            Exception: anything; it becomes a ``WeightLoadError``.
        """
        begun = time.monotonic()
        staged = await asyncio.to_thread(self._weights.stage, version, self._endpoints)
        sender = await asyncio.to_thread(self._publish, staged)
        await self._inner.connect([sender.endpoint])
        times = await self._inner.load(staged.version)
        elapsed_s = time.monotonic() - begun
        return MergeTimes(times.version, elapsed_s - times.stall_s, times.stall_s)

    def close(self) -> None:
        """Stop to serve the engine; may be called twice."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _publish(self, staged: Staged) -> WeightSender:
        if self._sender is None:
            self._whole = {name: tensor.clone() for name, tensor in staged.tensors.items()}
            self._sender = WeightSender(
                quantised_shards(shards_of(self._whole.items()), self._config),
                config=sender_config(self._config),
            )
        elif self._sender.newest_version == staged.version:
            return self._sender
        else:
            for name, tensor in staged.tensors.items():
                self._whole[name].copy_(tensor)
        self._sender.publish(staged.version)
        return self._sender
