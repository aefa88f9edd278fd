"""What a rollout replica's engine is made with, and how it gets weights and serves them."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from cosmos_app.control_files import read_weights_token
from cosmos_app.recipe import WeightSyncConfig
from cosmos_app.roles.adapters import MergedWeights, MergingClient
from cosmos_app.roles.process import RunContext, may_fork, own_address
from cosmos_app.roles.weights import CountingClient, ReceivedWeights, vllm_client
from cosmos_rollout import EngineSetup, KvPolicy, VLLMConfig
from cosmos_weightsync.integrations.vllm import VLLMWeightClient, engine_arguments


class Fetching(Protocol):
    """Gets weights from others."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that came for the version fetched last; 0 before the first."""
        ...


class EngineWeights:
    """How one engine gets its weights, by a source or by a client, whichever it asks for.

    Attributes:
        source: for engines of this process.
        fetching: who gets weights from others: the source or the client, or who gets adapters.
    """

    def __init__(self, config: WeightSyncConfig, token: str, *, serve_host: str) -> None:
        """Nothing is connected yet; the arguments are those of `ReceivedWeights`."""
        self._config = config
        self._token = token
        self._serve_host = serve_host
        self._client: VLLMWeightClient | None = None
        self.source = ReceivedWeights(config, token, serve_host=serve_host)
        self.fetching: Fetching = self.source

    def client(self, engine: Any, kv: KvPolicy) -> CountingClient:
        """Return what moves weights into vLLM's workers."""
        self._client = vllm_client(
            self._config, engine, kv, token=self._token, serve_host=self._serve_host
        )
        self.fetching = counting = CountingClient(self._client)
        return counting

    async def serve(self) -> tuple[str, ...]:
        """Serve from now on what the engine loads later, if others are to have it; say where.

        Raises:
            WeightSyncError: if that is not possible.
        """
        if self._client is None:
            return await asyncio.to_thread(self.source.serve)
        return tuple(await self._client.serve()) if self._serve_host else ()

    def describe_by(self, endpoints: Sequence[str]) -> None:
        """Have vLLM's workers ask these, the first time, what tensors there are."""
        if self._client is not None:
            self._client.describe_by(endpoints)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where other replicas can fetch the version loaded last; none if they are not to."""
        return self.source.endpoints if self._client is None else self._client.endpoints


def engine_weights(context: RunContext, *, shares_device: bool) -> EngineWeights:
    """Return how an engine gets its weights, and whether it serves them to others."""
    sync = context.recipe.weight_sync
    has_adapters = context.recipe.model.training.lora is not None
    serves = sync.from_rollouts and not shares_device and not has_adapters
    host = own_address() if serves else ""
    return EngineWeights(sync, read_weights_token(context.run), serve_host=host)


def engine_setup(
    context: RunContext, model: Path, weights: EngineWeights, ended: contextlib.AsyncExitStack
) -> EngineSetup:
    """Return what an engine is made with; what is opened for it is closed with ``ended``."""
    arguments: dict[str, Any] = {}
    if isinstance(context.recipe.rollout.engine, VLLMConfig):
        arguments = engine_arguments()
    has_adapters = context.recipe.model.training.lora is not None
    given = weights
    if has_adapters:
        given = _MergingWeights(context, ended)
        weights.fetching = given.source
    return EngineSetup(
        model_path=model,
        weight_client=given.client,
        weight_source=given.source,
        engine_arguments=arguments,
        may_fork=may_fork(),
    )


class _MergingWeights:
    """How an engine gets whole weights where the policy sends adapters."""

    def __init__(self, context: RunContext, ended: contextlib.AsyncExitStack) -> None:
        self._sync = context.recipe.weight_sync
        self._ended = ended
        token = read_weights_token(context.run)
        self.source = MergedWeights(self._sync, context.files.model, token)
        ended.callback(self.source.close)

    def client(self, engine: Any, kv: KvPolicy) -> MergingClient:
        inner = vllm_client(self._sync, engine, kv)
        made = MergingClient(inner, self.source, self._sync)
        self._ended.callback(made.close)
        return made
