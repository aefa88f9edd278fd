"""The trainer's end of vLLM's backend ``"cosmos"``, for those who drive it as vLLM's own backends.

```python
info = CosmosTrainerInitInfo(rank=rank, num_ranks=world_size)
engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
...
engine.send_weights()     # on every trainer rank, after every step
```
``client`` is vLLM's (HTTP, Ray), or anything with its four methods. How a source declares its
weights differs between vLLM 0.32 and 0.33; one module each reads it (``vllm_source_*``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from cosmos_weightsync.errors import ConfigurationError
from cosmos_weightsync.integrations import vllm_source_032, vllm_source_033
from cosmos_weightsync.sender import SenderConfig, WeightSender
from cosmos_weightsync.shards import Shard

__all__ = ["CosmosTrainerInitInfo", "CosmosTrainerWeightTransferEngine"]


@dataclass
class CosmosTrainerInitInfo(TrainerInitInfo):
    """How the trainer sends.

    Attributes:
        num_ranks: Trainer ranks; with more than one, `torch.distributed` must be up.
        sender: What each rank's sender is made with.
        transport: What the workers fetch with; see `ReceiverConfig`.
        worker: More fields of the workers' `InitInfo`, such as ``reuse``.
    """

    backend: ClassVar[str] = "cosmos"

    num_ranks: int = 1
    sender: SenderConfig | None = None
    transport: str = "auto"
    worker: Mapping[str, Any] = field(default_factory=dict[str, Any])


class CosmosTrainerWeightTransferEngine(TrainerWeightTransferEngine[CosmosTrainerInitInfo]):
    """Publishes versions 1, 2, 3, ... of a source, and has the workers take each."""

    init_info_cls = CosmosTrainerInitInfo

    def __init__(
        self,
        sender: WeightSender,
        shards: Sequence[Shard],
        info: CosmosTrainerInitInfo,
        **given: Any,
    ) -> None:
        # What else there is to give differs between versions of vLLM.
        super().__init__(**given, is_sender=info.is_sender)
        self._sender = sender
        self._shards = tuple(shards)
        self._info = info
        self._version = 0

    @classmethod
    def trainer_init(
        cls, init_info: CosmosTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """Begin to listen on every rank, and have the workers connect.

        Raises:
            ConfigurationError: there is no source, or none of a known kind.
        """
        shards = shards_of_source(source, init_info.rank, init_info.num_ranks)
        sender = WeightSender(
            shards, rank=init_info.rank, num_ranks=init_info.num_ranks, config=init_info.sender
        )
        engine = cls(sender, shards, init_info, client=client, source=source)
        endpoints = engine._gather(sender.endpoint)
        if engine.is_sender:
            token = init_info.sender.token if init_info.sender is not None else ""
            where = {"endpoints": endpoints, "transport": init_info.transport, "token": token}
            try:
                client.init_weight_transfer_engine({**init_info.worker, **where})
            except BaseException:
                sender.close()
                raise
        return engine

    def send_weights(self) -> None:
        """Publish the source's present values, and have every worker take them."""
        self._version += 1
        self._refresh()
        self._sender.publish(self._version)
        if self.is_sender:
            self.client.start_weight_update()
            self.client.update_weights({"version": self._version})
            self.client.finish_weight_update(weight_version=str(self._version))

    def shutdown(self) -> None:
        """Stop listening."""
        self._sender.close()

    def _refresh(self) -> None:
        """Copy what a source that cannot be viewed yields now to where the sender reads it."""
        fresh = shards_of_source(self.source, self._info.rank, self._info.num_ranks)
        with torch.no_grad():
            for mine, now in zip(self._shards, fresh, strict=True):
                if mine.tensor.data_ptr() != now.tensor.data_ptr():
                    mine.tensor.copy_(now.tensor)

    def _gather(self, endpoint: str) -> list[str]:
        if self._info.num_ranks == 1:
            return [endpoint]
        found = [""] * self._info.num_ranks
        torch.distributed.all_gather_object(found, endpoint)
        return found


def shards_of_source(source: Any, rank: int, num_ranks: int) -> tuple[Shard, ...]:
    """This rank's shards of a ``WeightSource`` of either version of vLLM.

    Raises:
        ConfigurationError: it is neither.
    """
    for version in (vllm_source_033, vllm_source_032):
        if version.applies(source):
            return version.shards_of_source(source, rank, num_ranks)
    raise ConfigurationError(
        f"{type(source).__name__} is no WeightSource of vLLM 0.32 or 0.33: hand over a "
        "ModuleSource(model)"
    )
