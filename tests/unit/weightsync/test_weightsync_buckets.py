"""Edges that share the bucket of a process."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cosmos_weightsync import (
    DeadlineError,
    ReceiverConfig,
    SenderConfig,
    WeightReceiver,
    WeightSender,
    shards_of,
)
from cosmos_weightsync.buckets import BucketPool, half_of
from cosmos_weightsync.deadlines import Deadline

CPU = torch.device("cpu")


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds)


def test_parts_lie_in_one_bucket_and_do_not_overlap():
    pool = BucketPool(1024)
    with pool.borrow() as one, pool.borrow() as other:
        loans = [one.take(100, CPU, soon()), other.take(512, CPU, soon())]
        loans += [one.take(100, CPU, soon()), other.take(64, CPU, soon())]
        assert [loan.start for loan in loans] == [0, 128, 640, 768]  # At multiples of 64.
        assert len({loan.view.untyped_storage().data_ptr() for loan in loans}) == 1
        one.give_back(loans[0])
        assert other.take(128, CPU, soon()).start == 0


def test_an_edge_that_holds_a_part_ends_its_message_rather_than_wait():
    pool = BucketPool(1024)
    with pool.borrow() as one, pool.borrow() as other:
        first = one.take(512, CPU, soon())
        other.take(512, CPU, soon())
        assert one.take(512, CPU, soon(), lambda: one.give_back(first)).start == 0


def test_an_edge_that_holds_none_waits_for_one_in_turn():
    pool = BucketPool(1024)
    with ThreadPoolExecutor(1) as threads, pool.borrow() as one:
        loan = one.take(1024, CPU, soon())
        with pool.borrow() as other:
            waiting = threads.submit(other.take, 512, CPU, soon())
            while not pool.num_waiting:
                pass
            one.give_back(loan)
            assert waiting.result().start == 0


def test_an_edge_waits_no_longer_than_its_deadline_and_says_for_whom():
    pool = BucketPool(1024, "sender rank 3")
    with pool.borrow() as one, pool.borrow() as other:
        one.take(600, CPU, soon())
        with pytest.raises(DeadlineError, match="waiting for a part of the bucket of sender rank"):
            other.take(512, CPU, soon(0.1))
        assert other.take(300, CPU, soon()).start == 640  # Nobody waits any more.


def test_a_message_that_hangs_keeps_its_bucket_and_the_others_get_another():
    pool = BucketPool(1024, patience_s=0.05)
    with pool.borrow() as hanging, pool.borrow() as other:
        held = hanging.take(1024, CPU, soon())
        held.view.fill_(7)
        other.take(512, CPU, soon()).view.zero_()
        other.take(512, CPU, soon()).view.zero_()
        assert int(held.view.sum()) == 7 * 1024
        hanging.give_back(held)
        assert hanging.take(64, CPU, soon(), lambda: None) is not None


def test_an_edge_that_ends_gives_everything_back():
    pool = BucketPool(1024)
    with pool.borrow(half_of(1024)) as one:
        assert [one.take(1, CPU, soon()).start for _ in range(2)] == [0, 512]
    with pool.borrow() as other:
        assert other.take(1024, CPU, soon()).start == 0


ODD_BYTES = 4160
"""No other tensor is as long, such as those that tests before this one have left."""


def num_buckets(num_bytes: int) -> int:
    """How many pieces of memory of this size tensors of bytes lie in now."""
    tensors = [item for item in gc.get_objects() if type(item) is torch.Tensor]
    storages = [item.untyped_storage() for item in tensors if item.dtype == torch.uint8]
    return len({item.data_ptr() for item in storages if item.nbytes() == num_bytes})


@pytest.mark.parametrize("transport", ["tcp", "process_group"])
def test_ten_receivers_and_a_bucket_for_two_messages(transport):
    torch.manual_seed(0)
    trained = torch.nn.Sequential(*[torch.nn.Linear(40, 30 + i) for i in range(12)])
    config = SenderConfig(bucket_bytes=ODD_BYTES)
    with WeightSender(shards_of(trained), config=config) as sender:
        sender.publish(1)
        wanted = [
            torch.nn.Sequential(*[torch.nn.Linear(40, 30 + i) for i in range(12)])
            for _ in range(10)
        ]
        receivers = [
            WeightReceiver(
                [sender.endpoint],
                wanted=shards_of(model),
                config=ReceiverConfig(transport=transport),
            )
            for model in wanted
        ]
        with ThreadPoolExecutor(10) as threads:
            list(threads.map(lambda receiver: receiver.stage(1, timeout_s=60), receivers))
        assert num_buckets(ODD_BYTES) == 1
        for receiver, model in zip(receivers, wanted, strict=True):
            receiver.commit()
            receiver.close()
            assert torch.equal(model[11].weight, trained[11].weight)
