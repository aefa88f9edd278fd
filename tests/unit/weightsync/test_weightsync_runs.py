"""Versions of two runs with the same number are told apart without a word from the user."""

import shutil
from contextlib import ExitStack

import torch

from cosmos_weightsync import (
    FileReceiver,
    FileSender,
    ReceiverConfig,
    SenderConfig,
    WeightDirectory,
    WeightReceiver,
    WeightSender,
    shards_of,
)
from cosmos_weightsync.runs import new_run_id


def sender_of(value: float, config: SenderConfig | None = None) -> WeightSender:
    return WeightSender(shards_of({"weight": torch.full((40, 30), value)}.items()), config=config)


def test_the_receiver_says_of_which_run_a_version_is():
    with sender_of(1.0) as one, sender_of(2.0) as other:
        found = []
        for sender in (one, other):
            sender.publish(7)
            with WeightReceiver([sender.endpoint]) as receiver:
                found.append(receiver.stage(7).run_id)
    assert found == [one.run_id, other.run_id]
    assert one.run_id != other.run_id


def test_a_restarted_trainer_is_followed_and_not_built_on():
    """Same version number, nearly the same values: only the run says that they are others."""
    with ExitStack() as stack:
        directory = stack.enter_context(WeightDirectory())
        config = SenderConfig(directory=directory.endpoint)
        wanted = ReceiverConfig(directory=directory.endpoint, transport="tcp", reuse="changes")
        first = stack.enter_context(sender_of(1.0, config))
        first.publish(1)
        receiver = stack.enter_context(WeightReceiver(config=wanted))
        receiver.stage(1)
        first.close()
        second = stack.enter_context(sender_of(2.0, config))
        second.publish(1)
        again = receiver.stage(1)
        assert again.run_id == second.run_id
        assert again.wire_bytes == 40 * 30 * 4
        assert receiver.staged_shards()[0].tensor.unique().tolist() == [2.0]


def test_what_the_user_says_counts():
    with sender_of(1.0, SenderConfig(run_id="mine")) as sender:
        assert sender.run_id == "mine"


def test_several_ranks_that_cannot_agree_have_no_name():
    assert [new_run_id(rank, 2) for rank in range(2)] == ["", ""]


def test_a_version_of_another_run_is_verified_where_it_is_before_it_is_committed():
    served = {"weight": torch.zeros(40, 30)}
    with ExitStack() as stack:
        directory = stack.enter_context(WeightDirectory())
        config = SenderConfig(directory=directory.endpoint)
        wanted = ReceiverConfig(directory=directory.endpoint)
        receiver = stack.enter_context(WeightReceiver(wanted=shards_of(served), config=wanted))
        for value in (1.0, 2.0):
            sender = stack.enter_context(sender_of(value, config))
            sender.publish(1)
            staged = receiver.stage(1)
            assert receiver.verify() == staged.digest
            receiver.commit()
            assert receiver.verify() == staged.digest
            sender.close()
    assert served["weight"].unique().tolist() == [2.0]


def test_files_of_another_run_are_verified_where_they_are_before_they_are_committed(tmp_path):
    served = {"weight": torch.zeros(40, 30)}
    receiver = FileReceiver(tmp_path, wanted=shards_of(served))
    for value in (1.0, 2.0):
        FileSender(shards_of({"weight": torch.full((40, 30), value)}), tmp_path).publish(1)
        staged = receiver.stage(1)
        assert receiver.verify() == staged.digest
        receiver.commit()
        assert receiver.verify() == staged.digest
        shutil.rmtree(tmp_path / "v00000001")
    assert served["weight"].unique().tolist() == [2.0]
