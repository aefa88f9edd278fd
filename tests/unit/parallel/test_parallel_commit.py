"""A step is taken by all members or by none; each member is a thread here."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cosmos_parallel import (
    ReplicaLostError,
    ReplicaMembership,
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


def join(port: int, index: int, *, is_alive=None, commit_s: float = 20.0) -> StoreReplicaGroup:
    return StoreReplicaGroup(
        open_store("127.0.0.1", port, hosting=False, timeout_s=20),
        ReplicaMembership(names=NAMES, index=index),
        timeout_s=20,
        commit_timeout_s=commit_s,
        is_alive=is_alive,
    )


def test_steps_that_all_members_have_are_committed(port, threads):
    def member(index: int) -> float:
        group = join(port, index)
        total = 0.0
        for step in range(5):
            tensor = torch.tensor([float(step)])
            group.sum_([tensor])
            group.commit()
            total += tensor.item()
        return total

    # 3 x (0 + 1 + 2 + 3 + 4)
    assert list(threads.map(member, range(3))) == [30.0] * 3


def test_a_store_does_not_grow_with_the_steps(port, threads):
    def member(index: int) -> None:
        group = join(port, index, is_alive=lambda name: True)
        for _ in range(20):
            group.sum_([torch.ones(1)])
            group.commit()

    list(threads.map(member, range(3)))
    left = open_store("127.0.0.1", port, hosting=False).num_keys()
    # of the last step: 3 are here, 3 ready, 1 decision; the others are of the connections
    assert left < 7 + 20


def test_what_members_say_of_steps_does_not_stay_in_the_store(port, threads):
    def member(index: int) -> None:
        group = join(port, index)
        for step in range(20):
            group.sum_([torch.ones(1)])
            group.commit()
            for what in ("losses", "words"):
                assert group.exchange(what, str(step)) == dict.fromkeys(NAMES, str(step))

    list(threads.map(member, range(3)))
    left = open_store("127.0.0.1", port, hosting=False).num_keys()
    # of the last step: 3 ready, 1 decision, 6 words; the others are of the connections
    assert left < 10 + 20


def test_a_step_that_one_member_does_not_have_is_void_for_all(port, threads):
    def member(index: int) -> tuple[str, ...]:
        group = join(port, index, commit_s=2)
        group.sum_([torch.ones(1)])
        group.commit()
        group.sum_([torch.ones(1)])
        if index == 1:
            return ()  # lost with all its sums, before it could say so
        with pytest.raises(ReplicaLostError, match="a step of policy-0, policy-1, policy-2 is vo"):
            group.commit()
        with pytest.raises(ReplicaLostError, match="is closed"):
            group.commit()
        return ("void",)

    assert list(threads.map(member, range(3))) == [("void",), (), ("void",)]


def test_who_comes_late_to_a_void_step_does_not_take_it(port, threads):
    import threading

    voided = threading.Event()

    def member(index: int) -> str:
        group = join(port, index, commit_s=1)
        group.sum_([torch.ones(1)])
        if index == 2:
            assert voided.wait(20)  # it stood still longer than the others wait
        with pytest.raises(ReplicaLostError) as raised:
            group.commit()
        voided.set()
        return str(raised.value)

    errors = list(threads.map(member, range(3)))
    assert all("is void" in error for error in errors)
    assert "policy-2 did not have all of its sums" in errors[0]


def test_a_silent_member_is_given_up_before_the_sums(port, threads):
    def member(index: int) -> tuple[str, ...]:
        group = join(port, index, is_alive=lambda name: name != "policy-1", commit_s=1)
        if index == 1:
            return ()
        with pytest.raises(ReplicaLostError, match="did not get in time to a step") as raised:
            group.sum_([torch.ones(1)])
        return raised.value.missing

    assert list(threads.map(member, range(3))) == [("policy-1",), (), ("policy-1",)]


def test_who_died_since_it_asked_to_take_part_is_not_connected_to(port, threads):
    begun = time.monotonic()

    def member(index: int) -> tuple[str, ...]:
        with pytest.raises(ReplicaLostError, match="policy-2 did not come in time to connect") as e:
            join(port, index, is_alive=lambda name: name != "policy-2", commit_s=0.2)
        return e.value.missing

    assert list(threads.map(member, range(2))) == [("policy-2",)] * 2
    assert time.monotonic() - begun < 10  # and not the 20 s that a living one is waited for


def test_who_comes_when_the_others_have_given_it_up_is_told_at_once(port, threads):
    given_up = threading.Semaphore(0)

    def member(index: int) -> tuple[str, ...]:
        if index == 2:
            for _ in range(2):  # or one of them would find it there
                given_up.acquire()
        begun = time.monotonic()
        with pytest.raises(ReplicaLostError, match="did not come in time to connect") as e:
            join(port, index, is_alive=lambda name: name != "policy-2", commit_s=0.2)
        given_up.release()
        assert time.monotonic() - begun < 10
        return e.value.missing

    assert list(threads.map(member, range(3))) == [("policy-2",), ("policy-2",), ()]


def test_ranks_that_do_not_watch_are_told_of_who_died_by_the_first(port, threads):
    def member(rank: int) -> None:
        with pytest.raises(ReplicaLostError, match="policy-1 did not come in time to connect"):
            StoreReplicaGroup(
                open_store("127.0.0.1", port, hosting=False, timeout_s=20),
                ReplicaMembership(names=NAMES[:2], index=0, rank=rank, num_ranks=2),
                timeout_s=20,
                commit_timeout_s=0.2,
                is_alive=lambda name: rank > 0 or name == "policy-0",
            )

    begun = time.monotonic()
    list(threads.map(member, range(2)))
    assert time.monotonic() - begun < 10


def test_a_member_that_is_slow_to_come_is_waited_for(port, threads):
    def member(index: int) -> float:
        time.sleep(1.0 if index == 2 else 0.0)
        group = join(port, index, is_alive=lambda name: True, commit_s=0.2)
        tensor = torch.ones(1)
        group.sum_([tensor])
        group.commit()
        return tensor.item()

    assert list(threads.map(member, range(3))) == [3.0] * 3
