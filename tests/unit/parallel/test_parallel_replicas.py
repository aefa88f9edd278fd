"""Sums over replicas, each replica a thread here; who is missing is named."""

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from capabilities import skip_without
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
from cosmos_parallel.nccl_groups import finish

NAMES = ("policy-0", "policy-1", "policy-2")

# Meets one other on a device of its own, sums twice, and says what came of it; the second dies.
MEMBER = """
import os, sys, torch
from cosmos_parallel import ReplicaLostError, ReplicaMembership, StoreReplicaGroup, open_store
port, index = map(int, sys.argv[1:])
torch.cuda.set_device(index)
store = open_store("127.0.0.1", port, hosting=False)
members = ReplicaMembership(names=("a", "b"), index=index)
group = StoreReplicaGroup(store, members, timeout_s=10, device_type="cuda")
ones = torch.ones(4, device="cuda")
group.sum_([ones])
assert ones.tolist() == [2.0] * 4
if index:
    os._exit(0)
try:
    group.sum_([ones])
except ReplicaLostError:
    print("lost")
torch.ones(4, device="cuda").sum().item()
print("goes on")
"""


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


def test_members_hear_each_other_but_for_who_died_before_it_spoke(port, threads):
    def member(index: int) -> list[dict[str, str]]:
        store = open_store("127.0.0.1", port, hosting=False, timeout_s=20)
        group = StoreReplicaGroup(
            store,
            ReplicaMembership(names=NAMES, index=index),
            timeout_s=20,
            commit_timeout_s=1,
            is_alive=lambda name: name != "policy-2",
        )
        heard = [dict(group.exchange("losses", f"[{index}]"))]
        if index != 2:
            heard.append(dict(group.exchange("words", f"word {index}")))
        return heard

    everybody = {"policy-0": "[0]", "policy-1": "[1]", "policy-2": "[2]"}
    left = {"policy-0": "word 0", "policy-1": "word 1"}
    assert list(threads.map(member, range(3))) == [
        [everybody, left],
        [everybody, left],
        [everybody],
    ]


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


def test_who_waits_for_other_replicas_is_told_from_who_waits_for_a_rank_of_its_own(port):
    def member(index: int, rank: int) -> StoreReplicaGroup:
        store = open_store("127.0.0.1", port, hosting=False, timeout_s=20)
        members = ReplicaMembership(names=NAMES[:2], index=index, rank=rank, num_ranks=2)
        return StoreReplicaGroup(
            store, members, timeout_s=20, commit_timeout_s=0.5, is_alive=lambda _: True
        )

    def waiting(groups: Sequence[StoreReplicaGroup], *, within_s: float) -> bool:
        end = time.monotonic() + within_s
        while not all(group.is_waiting for group in groups):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    with ThreadPoolExecutor(len(places)) as pool:
        groups = list(pool.map(member, *zip(*places, strict=True)))
        sums = [torch.ones(1) for _ in places]
        adding = [pool.submit(groups[0].sum_, sums[:1])]
        assert not waiting(groups[:1], within_s=1.5)
        adding.append(pool.submit(groups[1].sum_, sums[1:2]))
        assert waiting(groups[:2], within_s=10.0)
        adding += [pool.submit(groups[i].sum_, sums[i : i + 1]) for i in (2, 3)]
        for each in adding:
            each.result()
    assert [group.is_waiting for group in groups] == [False] * 4
    assert [each.item() for each in sums] == [2.0] * 4


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


def test_work_that_does_not_end_is_given_up_and_its_group_with_it(port, threads):
    stores = [open_store("127.0.0.1", port, hosting=False) for _ in range(2)]
    patience = timedelta(seconds=60)  # gloo's own; the device's work has none
    made = [threads.submit(dist.ProcessGroupGloo, s, r, 2, patience) for r, s in enumerate(stores)]
    group, other = (future.result() for future in made)
    ones = torch.ones(3)

    def take_part() -> None:
        other.allreduce([torch.ones(3)]).wait()

    done = threads.submit(take_part)
    finish(group, group.allreduce([ones]), 60.0)
    done.result()
    assert ones.tolist() == [2.0] * 3

    with pytest.raises(RuntimeError, match=r"not done after 0\.2 s"):
        finish(group, group.allreduce([ones]), 0.2)  # the other does not take part
    threads.submit(take_part).result()  # now it does: gloo would wait for it


@pytest.mark.gpu
def test_a_sum_on_devices_tells_of_a_member_that_died(port):
    if torch.cuda.device_count() < 2:
        skip_without("two-gpus")
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(port), str(index)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for index in range(2)
    ]
    with members[0], members[1]:
        try:
            told, _ = members[0].communicate(timeout=120)
        finally:
            for member in members:
                member.kill()
    assert told.split() == ["lost", "goes", "on"]


@pytest.mark.gpu
def test_a_group_on_devices_waits_for_members_no_longer_than_it_is_told():
    members = ReplicaMembership(names=("a", "b"), index=0)
    with pytest.raises(ReplicaLostError, match="waited 2 s for b"):
        StoreReplicaGroup(dist.HashStore(), members, timeout_s=2.0, device_type="cuda")
