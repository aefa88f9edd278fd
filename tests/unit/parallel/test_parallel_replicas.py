"""Sums over replicas, each replica a thread here; who is missing is named."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from cosmos_parallel import (
    AdamWConfig,
    Learner,
    LearnerConfig,
    ReplicaLostError,
    ReplicaMembership,
    SftLoss,
    SgdConfig,
    StoreReplicaGroup,
    open_store,
)

NAMES = ("policy-0", "policy-1", "policy-2")


@pytest.fixture
def port():
    host = open_store("127.0.0.1", 0, hosting=True)
    yield host.port
    del host


@pytest.fixture
def threads():
    with ThreadPoolExecutor(len(NAMES)) as pool:
        yield pool


def join(port: int, index: int, *, epoch: int = 0, timeout_s: float = 20.0) -> StoreReplicaGroup:
    store = open_store("127.0.0.1", port, hosting=False, timeout_s=timeout_s)
    members = ReplicaMembership(names=NAMES, index=index, epoch=epoch)
    return StoreReplicaGroup(store, members, timeout_s=timeout_s)


def test_every_replica_ends_with_the_same_sum(port, threads):
    def member(index: int) -> list[torch.Tensor]:
        group = join(port, index)
        tensors = [torch.full((3,), 10.0**index), torch.tensor([1.0 / (index + 3)])]
        group.sum_(tensors)
        group.sum_(tensors[:1])
        group.close()
        return tensors

    results = list(threads.map(member, range(3)))
    assert results[0][0].tolist() == [333.0] * 3
    assert results[0][1].item() == pytest.approx(1 / 3 + 1 / 4 + 1 / 5)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def test_a_member_that_never_comes_is_named(port, threads):
    def member(index: int) -> ReplicaLostError:
        with pytest.raises(ReplicaLostError, match="policy-2") as raised:
            join(port, index, timeout_s=2)
        return raised.value

    for error in threads.map(member, (0, 1)):
        assert error.missing == ("policy-2",)
        assert "waited 2 s for policy-2" in str(error)


def test_a_member_lost_between_sums_is_named_and_the_next_epoch_works(port, threads):
    def member(index: int) -> tuple[str, ...]:
        group = join(port, index, timeout_s=4)
        group.sum_([torch.ones(2)])
        if index == 1:
            group.close()
            return ()
        with pytest.raises(ReplicaLostError) as raised:
            group.sum_([torch.ones(2)])
        with pytest.raises(ReplicaLostError, match="epoch 0 is closed"):
            group.sum_([torch.ones(2)])
        return raised.value.missing

    assert list(threads.map(member, range(3))) == [("policy-1",), (), ("policy-1",)]

    def again(index: int) -> float:
        one = torch.ones(1)
        join(port, index, epoch=1).sum_([one])
        return one.item()

    assert list(threads.map(again, range(3))) == [3.0] * 3


def test_a_step_without_all_replicas_updates_nothing(port, threads):
    def member(index: int) -> float:
        group = join(port, index, timeout_s=4)
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        learner = Learner(model, LearnerConfig(optimizer=SgdConfig(lr=1.0)), replica_group=group)

        def loss(model: nn.Module, batch: torch.Tensor) -> SftLoss:
            total = model(batch).sum()
            return SftLoss(total=total, weight=torch.tensor(1.0), metrics={})

        # gradients 1, 2 and 3: the mean is 2, clipped to norm 1
        learner.step([torch.tensor([[index + 1.0]])], loss)
        if index != 2:
            with pytest.raises(ReplicaLostError):
                learner.step([torch.ones(1, 1)], loss)
        group.close()
        return model.weight.item()

    assert list(threads.map(member, range(3))) == pytest.approx([0.0] * 3, abs=1e-6)


def test_what_no_replica_trains_is_left_alone_as_it_is_by_one(port, threads):
    def weights(group: StoreReplicaGroup | None) -> list[float]:
        model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("used", "other")})
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        config = LearnerConfig(optimizer=AdamWConfig(lr=0.1, weight_decay=0.5))
        learner = Learner(model, config, replica_group=group)

        def loss(model: nn.ModuleDict, batch: torch.Tensor) -> SftLoss:
            return SftLoss(total=model["used"](batch).sum(), weight=torch.tensor(1.0), metrics={})

        learner.step([torch.ones(1, 1)], loss)
        return [parameter.item() for parameter in model.parameters()]

    alone = weights(None)
    assert alone == pytest.approx([0.85, 1.0])
    found = threads.map(lambda index: weights(join(port, index)), range(3))
    assert list(found) == [pytest.approx(alone)] * 3
