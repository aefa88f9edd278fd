"""What users of vLLM's interface hand over by mistake is refused in words of ours."""

import pytest

pytest.importorskip("vllm")

from cosmos_weightsync import ConfigurationError, VersionError
from cosmos_weightsync.integrations.vllm import VLLMWeightClient
from cosmos_weightsync.integrations.vllm_engine import CosmosWeightTransferEngine
from cosmos_weightsync.integrations.vllm_infos import InitInfo, UpdateInfo


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
