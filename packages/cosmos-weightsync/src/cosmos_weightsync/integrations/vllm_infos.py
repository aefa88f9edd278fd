"""What vLLM's users hand over for backend ``"cosmos"``."""

from dataclasses import dataclass, field
from typing import Literal

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from cosmos_weightsync.errors import ConfigurationError
from cosmos_weightsync.receiver_config import ReceiverConfig, usual_threads
from cosmos_weightsync.reuse import Reused
from cosmos_weightsync.settings import check_choice

__all__ = ["InitInfo", "UpdateInfo"]

Missing = Literal["refuse", "keep"]
When = Literal["now", "background"]


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where the weights come from.

    Attributes:
        endpoints: Of every sender rank; or of every worker of an engine that serves what it has.
        described_by: Whom to ask, the first time, what tensors there are; the endpoints if empty.
            A worker that is itself without a version cannot tell.
        transport: This and the following as in `ReceiverConfig`.
        serve_host: Where each worker serves what it has to other engines; empty for nobody.
        token: What the senders want to be shown.
        bucket_bytes: Of the bucket that all threads share.
        num_threads: How many senders a worker reads from at the same time.
        connect_timeout_s: How long meeting a sender may take.
        stall_s: A sender that is silent for so long counts as lost.
        reuse: ``nothing``, ``pieces`` or ``changes``.
        anchor_every: How often a version is fetched whole all the same.
        missing: As in `discover_layout`.
        describe: When to ask the senders what they have: ``"now"``, or ``"background"`` while the
            engine generates, for a client that calls `CosmosWeightTransferEngine.discover` later.
    """

    endpoints: list[str] = field(default_factory=list)
    described_by: list[str] = field(default_factory=list)
    transport: str = "auto"
    serve_host: str = ""
    token: str = ""
    bucket_bytes: int = 16 << 20
    num_threads: int = field(default_factory=usual_threads)
    connect_timeout_s: float = 60.0
    stall_s: float = 60.0
    reuse: Reused = "nothing"
    anchor_every: int = 64
    missing: Missing = "refuse"
    describe: When = "now"

    def receiver_config(self) -> ReceiverConfig:
        """How the worker's receiver fetches.

        Raises:
            ConfigurationError: an option makes no sense.
        """
        for endpoints in (self.endpoints, self.described_by):
            if isinstance(endpoints, str):
                raise ConfigurationError(f"endpoints are a list: [{endpoints!r}]")
        check_choice("missing", self.missing, Missing)
        check_choice("describe", self.describe, When)
        return ReceiverConfig(
            transport=self.transport,
            serve_host=self.serve_host,
            token=self.token,
            bucket_bytes=self.bucket_bytes,
            num_threads=self.num_threads,
            connect_timeout_s=self.connect_timeout_s,
            stall_s=self.stall_s,
            reuse=self.reuse,
            anchor_every=self.anchor_every,
        )


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which version to commit.

    Attributes:
        version: The version staged before; or, if none is, the oldest that will do.
        timeout_s: How long staging may take when it happens now.
    """

    version: int = 0
    timeout_s: float = 600.0
