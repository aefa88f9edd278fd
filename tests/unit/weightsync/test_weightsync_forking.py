"""Processes that fork: what children inherit must not outlive the parent, nor be used twice."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from cosmos_weightsync import PeerLostError, ReceiverConfig, WeightReceiver, WeightSender, shards_of

_TRAINER = """
import os, sys, time, torch
from cosmos_weightsync import VersionError, WeightSender, shards_of

sender = WeightSender(shards_of({"w": torch.ones(40000)}))
sender.publish(1)
print(sender.endpoint, flush=True)
sys.stdin.readline()
if os.fork() == 0:
    try:
        sender.publish(2)
    except VersionError as error:
        print(error, flush=True)
    time.sleep(120)
    os._exit(0)
time.sleep(120)
"""


@pytest.fixture
def trainer() -> Iterator[subprocess.Popen[str]]:
    """Forks when it is sent a line, and so do not end the two of them until the test has."""
    process = subprocess.Popen(
        [sys.executable, "-c", _TRAINER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_a_killed_trainer_is_missed_while_its_children_live(trainer, transport):
    """Children had copies of its sockets: receivers waited for it to the end of their time."""
    endpoint = trainer.stdout.readline().strip()
    config = ReceiverConfig(transport=transport)
    with WeightReceiver([endpoint], config=config) as receiver:
        receiver.stage(1)
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        said = trainer.stdout.readline()
        assert f"this process is a fork of {trainer.pid}" in said
        assert receiver.stage(1).version == 1  # The parent still serves.
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait(30)
        with pytest.raises(PeerLostError):
            receiver.stage(2, timeout_s=60)
    with pytest.raises(PeerLostError, match="nobody listens there"):
        WeightReceiver([endpoint]).stage(1, timeout_s=60)


def test_a_receiver_that_was_forked_connects_anew():
    """It wrote into its parent's conversation."""
    taken = torch.zeros(3)
    with (
        WeightSender(shards_of({"w": torch.ones(3)})) as sender,
        WeightReceiver([sender.endpoint], wanted=shards_of({"w": taken})) as receiver,
    ):
        sender.publish(1)
        receiver.stage(1)
        child = os.fork()
        if child == 0:
            receiver.stage(1, timeout_s=30)
            os._exit(receiver.commit() - 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        sender.publish(2)
        assert receiver.stage(2).version == 2
        assert sender.num_sessions >= 1
