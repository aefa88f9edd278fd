"""Mistakes that a newcomer makes end in an error that says what to do instead."""

import math
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from cosmos_weightsync import (
    ConfigurationError,
    FileSender,
    LayoutError,
    PeerLostError,
    ProtocolError,
    Quorum,
    ReceiverConfig,
    SenderConfig,
    UnknownTensorError,
    VersionError,
    WeightReceiver,
    WeightSender,
    shards_of,
)


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    with WeightSender(shards_of(nn.Linear(3, 2))) as made:
        made.publish(1)
        yield made


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (
            lambda: Wrapped(nn.Linear(3, 2)),
            r"model\.weight .*they have 2 tensors, such as weight; 'model\.' is in front of one of "
            "the two only: .*'converted_shards'",
        ),
        (lambda: {"weights": torch.zeros(2, 3)}, "weights .*they have 2 tensors, such as weight$"),
    ],
)
def test_other_names_are_held_against_those_that_are_there(sender, wanted, words):
    with (
        WeightReceiver([sender.endpoint], wanted=shards_of(wanted())) as receiver,
        pytest.raises(UnknownTensorError, match=words),
    ):
        receiver.stage(1)


def test_a_version_that_was_published_before(sender):
    with pytest.raises(VersionError, match="version 1 comes after version 1: each must be newer"):
        sender.publish(1)


@pytest.mark.parametrize("wanted", [lambda: None, lambda: shards_of(nn.Linear(3, 2))])
def test_a_sender_that_has_ended_or_is_on_another_host(wanted: Callable, sender):
    sender.close()
    with (
        WeightReceiver([sender.endpoint], wanted=wanted()) as receiver,
        pytest.raises(
            PeerLostError, match=r"refused; nobody listens .*bind_host.*token; of 'push' --host\)$"
        ),
    ):
        receiver.stage(1)


def test_an_endpoint_of_something_else():
    with socket.create_server(("127.0.0.1", 0)) as web:

        def answer() -> None:
            with web.accept()[0] as caller:
                caller.recv(1 << 16)
                caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        with (
            WeightReceiver([f"127.0.0.1:{web.getsockname()[1]}"]) as receiver,
            pytest.raises(
                ProtocolError, match="what answers there is something else than a sender"
            ),
        ):
            receiver.stage(1)
        answering.join()


def test_a_tensor_that_is_called_as_the_metadata_of_files(tmp_path):
    """It took their place in the header, and the file could not be read."""
    named = {"__metadata__": torch.ones(2), "w": torch.ones(2)}
    with pytest.raises(LayoutError, match="__metadata__: no tensor of a safetensors file"):
        FileSender(shards_of(named), str(tmp_path)).publish(1)
    assert not [*tmp_path.glob("v*")]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ReceiverConfig(mode="inplace"), "mode is 'inplace'.*'staged', 'in_place'"),
        (lambda: ReceiverConfig(prefer="sender"), "prefer is 'sender'.*'receivers', 'planned'"),
        (lambda: ReceiverConfig(stall_s=-1.0), r"stall_s is -1\.0; it must be above 0"),
        (lambda: ReceiverConfig(stall_s=math.nan), "stall_s is nan; it must be above 0"),
        (lambda: ReceiverConfig(connect_timeout_s=0), "connect_timeout_s is 0; it must be above 0"),
        (lambda: SenderConfig(snapshot_memory="share"), "snapshot_memory is 'share'.*'private'"),
        (lambda: SenderConfig(idle_s=0.0), r"idle_s is 0\.0; it must be above 0"),
        (lambda: Quorum("any"), "kind is 'any'.*'all', 'at_least', 'each'"),
    ],
)
def test_a_setting_that_there_is_not_is_not_taken_for_another(make, words):
    """One that says ``inplace`` would have weights that are never replaced."""
    with pytest.raises(ConfigurationError, match=words):
        make()
