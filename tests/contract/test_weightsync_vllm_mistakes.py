"""What users of vLLM's interface hand over by mistake is refused in words of ours."""

import socket
from typing import Any

import pytest
from torch import nn

pytest.importorskip("vllm")

from vllm.distributed.weight_transfer.base import ModuleSource

from cosmos_weightsync import ConfigurationError, DeadlineError, TransferError, VersionError
from cosmos_weightsync.frames import parse_endpoint
from cosmos_weightsync.integrations.vllm import VLLMWeightClient
from cosmos_weightsync.integrations.vllm_engine import CosmosWeightTransferEngine
from cosmos_weightsync.integrations.vllm_infos import InitInfo, UpdateInfo
from cosmos_weightsync.integrations.vllm_trainer import (
    CosmosTrainerInitInfo,
    CosmosTrainerWeightTransferEngine,
)


def test_one_endpoint_is_no_list_of_its_characters() -> None:
    with pytest.raises(ConfigurationError, match=r"endpoints are a list: \['127.0.0.1:1'\]"):
        InitInfo(endpoints="127.0.0.1:1").receiver_config()


async def test_a_client_says_so_before_it_asks_its_engine() -> None:
    client = VLLMWeightClient(None)
    with pytest.raises(ConfigurationError, match=r"endpoints are a list: \['127.0.0.1:1'\]"):
        await client.connect("127.0.0.1:1")
    client.describe_by("127.0.0.1:2")
    with pytest.raises(ConfigurationError, match=r"endpoints are a list: \['127.0.0.1:2'\]"):
        await client.connect(["127.0.0.1:1"])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: VLLMWeightClient(None, kv_cache="clear"), "kv_cache is 'clear'.*'recompute'"),
        (lambda: InitInfo(missing="ignore").receiver_config(), "missing is 'ignore'.*'keep'"),
        (lambda: InitInfo(describe="later").receiver_config(), "describe is 'later'.*'background'"),
    ],
)
def test_a_word_that_there_is_not_is_not_taken_for_another(make, words) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


@pytest.mark.parametrize("version", ["7", None, 1.5])
def test_a_version_is_a_whole_number(version: object) -> None:
    engine = object.__new__(CosmosWeightTransferEngine)
    engine._receiver = engine._layout = engine
    with pytest.raises(VersionError, match="want a whole number"):
        engine.receive_weights(UpdateInfo(version=version))


class _Refusing:
    """vLLM's client of an engine that cannot take these weights."""

    endpoints: tuple[str, ...] = ()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.endpoints = tuple(init_info["endpoints"])
        raise ValueError("no such tensor")


def test_nobody_listens_any_more_for_an_engine_that_refused() -> None:
    client = _Refusing()
    with pytest.raises(ValueError, match="no such tensor"):
        CosmosTrainerWeightTransferEngine.trainer_init(
            CosmosTrainerInitInfo(rank=0), client=client, source=ModuleSource(nn.Linear(2, 2))
        )
    (endpoint,) = client.endpoints
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(parse_endpoint(endpoint), timeout=20)


class _Staging:
    """What a client sees of an engine whose second worker never gets done, or was never asked."""

    def __init__(self, state: str) -> None:
        self._state = state

    async def collective_rpc(self, method: str, *_: object) -> list[Any]:
        assert method == "cosmos_staged"
        return [{"state": "staged"}, {"state": self._state}, {"state": "staged"}]


async def test_the_worker_that_stages_nothing_is_named() -> None:
    client = VLLMWeightClient(_Staging("running"), timeout_s=0.0)
    with pytest.raises(DeadlineError, match=r"of 3 workers, those of ranks \[1\] staged nothing"):
        await client._until_settled(0.0)
    client = VLLMWeightClient(_Staging("idle"))
    with pytest.raises(TransferError, match="staging failed: worker 1 is idle"):
        await client._until_staged(0.0)
