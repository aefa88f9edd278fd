"""Versions as trainers have them: ints of Python, of NumPy, of tensors; and what is none."""

import numpy as np
import pytest
import torch

from cosmos_weightsync import (
    FileReceiver,
    FileSender,
    VersionError,
    WeightReceiver,
    WeightSender,
    shards_of,
)


@pytest.mark.parametrize("version", [np.int64(3), torch.tensor(3)])
def test_steps_of_numpy_and_torch_are_versions(tmp_path, version):
    given, taken = torch.arange(8.0), torch.zeros(8)
    wanted = shards_of([("w", taken)])
    FileSender(shards_of([("w", given)]), tmp_path).publish(version)
    assert FileReceiver(tmp_path, wanted=wanted).stage(version).version == 3
    with WeightSender(shards_of([("w", given)])) as sender:
        sender.publish(version)
        with WeightReceiver([sender.endpoint], wanted=wanted) as receiver:
            assert receiver.stage(version, timeout_s=30).version == 3
            assert receiver.commit() == 3
    assert torch.equal(given, taken)


@pytest.mark.parametrize("version", [2.5, "2", torch.tensor(2.0), None])
def test_what_is_no_whole_number_is_refused(tmp_path, version):
    shards = shards_of([("w", torch.arange(8.0))])
    with WeightSender(shards) as sender, WeightReceiver([sender.endpoint]) as receiver:
        files = FileSender(shards, tmp_path), FileReceiver(tmp_path)
        for refuses in (sender.publish, receiver.stage, files[0].publish, files[1].stage):
            with pytest.raises(VersionError, match="want a whole number"):
                refuses(version)
        assert sender.newest_version is None


def test_a_sender_that_is_closed_publishes_nothing():
    sender = WeightSender(shards_of([("w", torch.arange(8.0))]))
    sender.close()
    with pytest.raises(VersionError, match="version 1 comes after the sender was closed"):
        sender.publish(1)
