"""Publishing only the parameters that train."""

import pytest
import torch
from torch import nn

from cosmos_weightsync import LayoutError, ReceiverConfig, WeightReceiver, WeightSender, shards_of
from cosmos_weightsync.encodings import adapter_shards, trainable


@pytest.fixture
def model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


def test_only_what_trains_travels(model):
    with WeightSender(shards_of(trainable(model))) as sender:
        sender.publish(1)
        config = ReceiverConfig(transport="tcp")
        with WeightReceiver([sender.endpoint], config=config) as receiver:
            assert receiver.stage(1).num_bytes == (4 * 2 + 2) * 4
            staged = {shard.spec.name: shard.tensor for shard in receiver.staged_shards()}
    assert list(staged) == ["1.weight", "1.bias"]
    assert torch.equal(staged["1.weight"], model[1].weight)


def test_a_module_without_the_adapter_is_refused(model):
    with pytest.raises(LayoutError, match="no adapter 'default'"):
        adapter_shards(model)
