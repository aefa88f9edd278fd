"""What senders and receivers open and close, also when something is refused or runs out."""

import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from cosmos_weightsync import (
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    ReceiverConfig,
    SenderConfig,
    WeightDirectory,
    WeightReceiver,
    WeightSender,
)


@pytest.fixture
def trainer(make_trainer):
    return make_trainer({"embed": (37, 16), "norm": (16,)})


def wait_until(is_true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < give_up
        time.sleep(0.01)


@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightSender([], config=SenderConfig(directory="nowhere")),
        lambda: WeightReceiver(
            ["nowhere"], config=ReceiverConfig(transport="tcp", serve_host="127.0.0.1")
        ),
        lambda: WeightReceiver(
            ["127.0.0.1:1"],
            config=ReceiverConfig(directory="127.0.0.1:1", serve_host="127.0.0.1"),
        ),
        lambda: WeightReceiver(config=ReceiverConfig(directory="x:1:", serve_host="127.0.0.1")),
        lambda: WeightReceiver(["127.0.0.1:65536"]),
    ],
)
def test_what_is_refused_on_construction_leaves_nothing_open(make):
    before = threading.enumerate()
    with pytest.raises(ConfigurationError):
        make()
    assert [thread for thread in threading.enumerate() if thread not in before] == []


def test_a_name_that_no_host_can_have_is_nobody_to_reach():
    with pytest.raises(PeerLostError, match="cannot be reached"):
        WeightReceiver([f"{'a' * 70}.example:1"]).stage()


def test_a_sender_that_ran_out_of_descriptors_is_reached_once_there_are_some(stack, trainer):
    trainer.publish(1)
    host, _, port = trainer.endpoints[0].partition(":")
    callers = [stack.enter_context(socket.socket()) for _ in range(2)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 50, hard))
        with suppress(OSError):  # There are no more.
            while True:
                taken.append(os.dup(taken[0]))
        for caller in callers:
            caller.connect((host, int(port)))
        time.sleep(0.1)  # The sender gets to see them.
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints))
    assert receiver.stage(1, timeout_s=30).version == 1


def test_closing_that_runs_out_of_time_still_hangs_up_on_everybody(stack):
    directory = stack.enter_context(WeightDirectory())
    sender = WeightSender([], config=SenderConfig(directory=directory.endpoint))
    config = ReceiverConfig(directory=directory.endpoint, serve_host="127.0.0.1")
    receiver = WeightReceiver(wanted=[], config=config)
    stack.callback(sender.close)
    stack.callback(receiver.close)
    endpoint = sender.endpoint.split(":")
    wait_until(lambda: len(directory.view.members) == 2)
    with pytest.raises(DeadlineError):
        sender.close(timeout_s=0.0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((endpoint[0], int(endpoint[1])), timeout=30)
    with pytest.raises(DeadlineError):
        receiver.close(timeout_s=0.0)
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "weight-attendance"])
