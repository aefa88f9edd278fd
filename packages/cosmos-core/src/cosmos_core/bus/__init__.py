"""The control plane over Redis: a bundled server, typed records, and the loop of the controller."""

from cosmos_core.bus.answering import answers
from cosmos_core.bus.channel import ReplicaChannel
from cosmos_core.bus.code_version import code_version
from cosmos_core.bus.connection import Bus
from cosmos_core.bus.errors import (
    BusError,
    BusPasswordError,
    BusRefusedError,
    BusUnreachableError,
    CodeVersionError,
    ControllerGoneError,
    FencedError,
    LeaseHeldError,
    PayloadMissingError,
    RunLostError,
    ServerSettingsError,
    ServerStartError,
    SupersededError,
)
from cosmos_core.bus.host import ControllerHost, HostConfig, Journal
from cosmos_core.bus.ledger import Commit, Dispatch, Ledger, Logged, Past, Reported
from cosmos_core.bus.passwords import mask_password
from cosmos_core.bus.server import RedisServer

__all__ = [
    "Bus",
    "BusError",
    "BusPasswordError",
    "BusRefusedError",
    "BusUnreachableError",
    "CodeVersionError",
    "Commit",
    "ControllerGoneError",
    "ControllerHost",
    "Dispatch",
    "FencedError",
    "HostConfig",
    "Journal",
    "LeaseHeldError",
    "Ledger",
    "Logged",
    "Past",
    "PayloadMissingError",
    "RedisServer",
    "ReplicaChannel",
    "Reported",
    "RunLostError",
    "ServerSettingsError",
    "ServerStartError",
    "SupersededError",
    "answers",
    "code_version",
    "mask_password",
]
