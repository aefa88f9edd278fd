"""A model that moves into other memory after it was described is noticed at both ends."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from cosmos_weightsync import (
    FileReceiver,
    FileSender,
    LayoutError,
    ReceiverConfig,
    WeightReceiver,
    WeightSender,
    converted_shards,
    shards_of,
)
from cosmos_weightsync.encodings import trainable

Move = Callable[[nn.Linear], object]


def _filled(value: float) -> nn.Linear:
    model = nn.Linear(4, 3)
    nn.init.constant_(model.weight, value)
    return model


def _replace_data(model: nn.Linear) -> None:
    model.weight.data = model.weight.data.clone()


def _replace_parameter(model: nn.Linear) -> None:
    model.weight = nn.Parameter(model.weight.detach().clone())


def _load_by_assignment(model: nn.Linear) -> None:
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(held, assign=True)


MOVES: list[Move] = [
    lambda model: model.to(torch.bfloat16),
    _replace_data,
    _replace_parameter,
    _load_by_assignment,
]


@pytest.mark.parametrize("move", MOVES)
def test_a_model_that_moved_is_not_published(move: Move, tmp_path: Path) -> None:
    model = _filled(1.0)
    files = FileSender(shards_of(model), tmp_path)
    with WeightSender(shards_of(model)) as sender:
        sender.publish(1)
        move(model)
        with pytest.raises(LayoutError, match=r"weight: .* other memory .*shards_of"):
            sender.publish(2)
        assert sender.newest_version == 1
    with pytest.raises(LayoutError, match=r"weight: .* other memory"):
        files.publish(1)


@pytest.mark.parametrize("move", MOVES)
def test_a_model_that_moved_is_not_said_to_be_filled(move: Move, tmp_path: Path) -> None:
    trained, served = _filled(1.0), _filled(0.0)
    FileSender(shards_of(trained), tmp_path).publish(1)
    files = FileReceiver(tmp_path, wanted=shards_of(served))
    files.stage(1)
    with (
        WeightSender(shards_of(trained)) as sender,
        WeightReceiver([sender.endpoint], wanted=shards_of(served)) as receiver,
    ):
        sender.publish(1)
        receiver.stage(1)
        move(served)
        for attempt in (receiver.commit, receiver.verify, receiver.stage):
            with pytest.raises(LayoutError, match=r"weight: .* other memory"):
                attempt()
        assert receiver.version is None
    for attempt in (files.commit, files.verify, files.stage):
        with pytest.raises(LayoutError, match=r"weight: .* other memory"):
            attempt()


def test_a_model_that_moved_is_not_received_into() -> None:
    trained, served = _filled(1.0), _filled(0.0)
    with WeightSender(shards_of(trained)) as sender:
        sender.publish(1)
        config = ReceiverConfig(mode="in_place")
        with WeightReceiver([sender.endpoint], wanted=shards_of(served), config=config) as receiver:
            served.double()
            with pytest.raises(LayoutError, match=r"weight: .* other memory"):
                receiver.stage(1)


def test_renamed_and_chosen_shards_are_watched_as_well() -> None:
    model = _filled(1.0)
    rows = converted_shards(model, lambda held: {"first": held["weight"][:1]})
    for shards in (rows, shards_of(trainable(model))):
        model.weight.data = model.weight.data.clone()
        with WeightSender(shards) as sender, pytest.raises(LayoutError, match="other memory"):
            sender.publish(1)


def test_training_and_freezing_and_tying_are_no_moves() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with WeightSender(shards_of(model)) as sender, WeightReceiver([sender.endpoint]) as receiver:
        for version in range(1, 4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model[0].requires_grad_(requires_grad=version != 2)
            model.load_state_dict(model.state_dict())
            sender.publish(version)
            receiver.stage(version)
            held = {shard.spec.name: shard.tensor for shard in receiver.staged_shards()}
            assert torch.equal(held["1.weight"], model[1].weight)


def test_memory_that_was_given_up_and_had_again_is_no_move() -> None:
    """As a trainer does that shares its device with an engine: views follow their storage."""
    model = _filled(1.0)
    with WeightSender(shards_of(model)) as sender, WeightReceiver([sender.endpoint]) as receiver:
        before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        meanwhile: list[torch.Tensor] = []
        for parameter in model.parameters():
            storage = parameter.untyped_storage()
            size = storage.nbytes()
            storage.resize_(0)
            meanwhile.append(torch.empty(size, dtype=torch.uint8))  # somebody else has it now
            storage.resize_(size)
        assert all(p.data_ptr() != before[name] for name, p in model.named_parameters())
        nn.init.constant_(model.weight, 2.0)
        nn.init.constant_(model.bias, 3.0)
        sender.publish(1)
        receiver.stage(1)
        held = {shard.spec.name: shard.tensor for shard in receiver.staged_shards()}
        assert held["weight"].tolist() == [[2.0] * 4] * 3
        assert held["bias"].tolist() == [3.0] * 3


@pytest.mark.parametrize("mode", ["staged", "in_place"])
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_memory_that_was_sent_or_received_into_can_still_be_given_up(mode, transport):
    """FSDP and what takes models out of memory resize it; torch refused: 'not resizable'."""
    trained, served = _filled(1.0), _filled(0.0)
    config = ReceiverConfig(mode=mode, transport=transport)
    with (
        WeightSender(shards_of(trained)) as sender,
        WeightReceiver([sender.endpoint], wanted=shards_of(served), config=config) as receiver,
    ):
        sender.publish(1)
        receiver.stage(1)
        receiver.commit()
        receiver.verify()
    for model in (trained, served):
        assert model.weight.tolist() == [[1.0] * 4] * 3
        model.weight.untyped_storage().resize_(0)


def test_memory_that_was_written_to_files_can_still_be_given_up(tmp_path):
    trained = _filled(1.0)
    FileSender(shards_of(trained), str(tmp_path)).publish(1)
    trained.weight.untyped_storage().resize_(0)
