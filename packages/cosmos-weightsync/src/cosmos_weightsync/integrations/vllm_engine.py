"""The engine behind vLLM's backend ``"cosmos"``: lives in each worker, receives and commits.

Only `cosmos_weightsync.integrations.vllm.register` names this module, and vLLM imports it when
the backend is used. Plain users of vLLM's interface need nothing else: ``update_weights`` with
``{"version": v}`` stages inside the pause if nobody staged before.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from cosmos_weightsync.errors import VersionError
from cosmos_weightsync.integrations.vllm_reload import begin_reload, end_reload, load_tensors
from cosmos_weightsync.receiver import ReceiverConfig, WeightReceiver

__all__ = ["CosmosWeightTransferEngine", "InitInfo", "UpdateInfo"]


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where the weights come from.

    Attributes:
        endpoints: Of every sender rank.
        transport: As in `ReceiverConfig`.
        token: As in `ReceiverConfig`.
        bucket_bytes: As in `ReceiverConfig`.
    """

    endpoints: list[str] = field(default_factory=list)
    transport: str = "auto"
    token: str = ""
    bucket_bytes: int = 16 << 20


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which version to commit.

    Attributes:
        version: The version staged before; or, if none is, the oldest that will do.
        timeout_s: How long staging may take when it happens now.
    """

    version: int = 0
    timeout_s: float = 600.0


class CosmosWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives whole tensors in checkpoint names and loads them by the model's own loader."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The arguments are vLLM's and differ between its versions.
        super().__init__(*args, **kwargs)
        self._receiver: WeightReceiver | None = None
        self._stager: threading.Thread | None = None
        self._failure: Exception | None = None
        self._required: frozenset[str] = frozenset()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Use these senders from now on; connects when first staging."""
        self.shutdown()
        self._receiver = WeightReceiver(
            init_info.endpoints,
            config=ReceiverConfig(
                transport=init_info.transport,
                token=init_info.token,
                bucket_bytes=init_info.bucket_bytes,
            ),
        )

    def begin_stage(self, version: int, timeout_s: float) -> None:
        """Stage in a background thread; returns at once.

        Raises:
            VersionError: a staging is still running, or there are no senders.
        """
        receiver = self._connected()
        if self._stager is not None and self._stager.is_alive():
            raise VersionError("a staging is still running")
        self._failure = None
        self._stager = threading.Thread(
            target=self._stage, args=(receiver, version, timeout_s), name="weight-stager"
        )
        self._stager.daemon = True
        self._stager.start()

    def stage_state(self) -> dict[str, Any]:
        """How the staging goes, as plain values."""
        if self._stager is not None and self._stager.is_alive():
            return {"state": "running"}
        if self._failure is not None:
            return {
                "state": "failed",
                "error": f"{type(self._failure).__name__}: {self._failure}",
            }
        staged = self._receiver.staged if self._receiver is not None else None
        if staged is None:
            return {"state": "idle"}
        return {
            "state": "staged",
            "version": staged.version,
            "num_bytes": staged.num_bytes,
            "seconds": staged.seconds,
            "digest": staged.digest,
        }

    def start_weight_update(self) -> None:
        """Prepare the model; vLLM has paused generation."""
        self._required = begin_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Commit. Overridden because vLLM's own synchronises an accelerator, which may not be."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the staged version, staging it first if nobody did."""
        receiver = self._connected()
        if self._stager is not None:
            self._stager.join(update_info.timeout_s)
        staged = receiver.staged
        if staged is None or staged.version < update_info.version:
            receiver.stage(update_info.version, timeout_s=update_info.timeout_s)
        shards = receiver.staged_shards()
        tensors = ((shard.spec.name, shard.tensor) for shard in shards)
        load_tensors(self.model, tensors, self._required)
        receiver.commit()

    def finish_weight_update(self) -> None:
        """Make the model ready to run."""
        end_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Hang up on the senders."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
        if self._stager is not None:
            self._stager.join(10.0)
            self._stager = None

    def _connected(self) -> WeightReceiver:
        if self._receiver is None:
            raise VersionError("init_weight_transfer_engine with the senders' endpoints first")
        return self._receiver

    def _stage(self, receiver: WeightReceiver, version: int, timeout_s: float) -> None:
        try:
            receiver.stage(version, timeout_s=timeout_s)
        except Exception as error:  # noqa: BLE001 - handed over to stage_state, in another thread
            self._failure = error
