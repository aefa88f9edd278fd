"""A dim of one element may have any stride: torch calls such tensors contiguous all the same."""

import contextlib
from pathlib import Path

import pytest
import torch

from cosmos_weightsync import (
    FileReceiver,
    FileSender,
    ReceiverConfig,
    SenderConfig,
    WeightReceiver,
    WeightSender,
    shards_of,
)
from cosmos_weightsync.transports import LocalTransport


def _odd(start: float) -> dict[str, torch.Tensor]:
    """What transposing a head of one row, or taking an element of a column, makes of the strides.

    The last is in rows with gaps.
    """
    base = torch.arange(start, start + 6400).view(80, 80)
    return {
        "column": base[:1].T,
        "element": base[:1, 3],
        "corner": base.T[:1, :1],
        "columns": base.as_strided((2, 3, 1), (3, 1, 17)),
        "rows": base.as_strided((4, 64, 1), (80, 1, 17), 2000),
    }


@pytest.mark.parametrize("mode", ["staged", "in_place"])
@pytest.mark.parametrize("reuse", ["nothing", "changes"])
@pytest.mark.parametrize("transport", ["tcp", "shared_memory", "cross_memory", "local"])
def test_tensors_with_a_dim_of_one_arrive_whatever_its_stride(transport, reuse, mode):
    trained, served = _odd(1.0), _odd(7000.0)
    own = [LocalTransport()]
    sending = SenderConfig(num_bases=1)
    config = ReceiverConfig(transport=transport, reuse=reuse, mode=mode)
    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(
            WeightSender(shards_of(trained), config=sending, transports=own)
        )
        receiver = stack.enter_context(
            WeightReceiver(
                [sender.endpoint], wanted=shards_of(served), config=config, transports=own
            )
        )
        for version in range(1, 4):
            trained["column"] += 1.0
            sender.publish(version)
            receiver.stage(version)
            receiver.commit()
            receiver.verify()
            for name, tensor in trained.items():
                assert torch.equal(served[name], tensor), name


def test_tensors_with_a_dim_of_one_pass_through_files_whatever_its_stride(tmp_path: Path):
    trained, served = _odd(1.0), _odd(7000.0)
    FileSender(shards_of(trained), tmp_path).publish(1)
    receiver = FileReceiver(tmp_path, wanted=shards_of(served))
    receiver.stage()
    receiver.commit()
    receiver.verify()
    for name, tensor in trained.items():
        assert torch.equal(served[name], tensor), name
