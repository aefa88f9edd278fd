"""Receivers of one group put a version to use together, or none of them does."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from weight_members import Receiver, Sender, wait_until

from cosmos_weightsync import (
    DeadlineError,
    DigestError,
    Quorum,
    QuorumError,
)


def test_nobody_commits_before_all_are_ready(stack, directory):
    sender = Sender(stack, directory.endpoint)
    sender.publish(1)
    group = [Receiver(stack, directory.endpoint, group="g") for _ in range(3)]
    wait_until(lambda: len(directory.view.members) == 4)
    pool = stack.enter_context(ThreadPoolExecutor(3))
    votes = []
    for member in group:
        assert all(other.receiver.version is None for other in group)
        assert not any(vote.done() for vote in votes)
        member.receiver.stage(1, timeout_s=30)
        votes.append(pool.submit(member.receiver.commit_together))
    assert [vote.result(30) for vote in votes] == [1, 1, 1]
    for member in group:
        member.assert_holds(1)


def test_a_receiver_that_fails_leaves_the_others_on_the_old_version(stack, directory):
    sender = Sender(stack, directory.endpoint)
    sender.publish(1)
    group = [Receiver(stack, directory.endpoint, group="g", name=name) for name in ("a", "b")]
    wait_until(lambda: len(directory.view.members) == 3)
    for member in group:
        member.update(1)
    sender.publish(2)
    group[0].receiver.stage(2)
    group[1].receiver.decline(2)
    words = f"version 2 is not committed: .* failed: b at {group[1].receiver.endpoint}$"
    with pytest.raises(QuorumError, match=words):
        group[0].receiver.commit_together(timeout_s=30)
    for member in group:
        member.assert_holds(1)


def test_receivers_of_other_bytes_do_not_commit_the_same_version(stack, directory):
    before = Sender(stack, directory.endpoint)
    before.publish(1)
    group = [
        Receiver(stack, directory.endpoint, group="g", name=name, serve_host="")
        for name in ("a", "b")
    ]
    wait_until(lambda: len(directory.view.members) == 3)
    group[0].receiver.stage(1)
    first = stack.enter_context(ThreadPoolExecutor(1)).submit(group[0].receiver.commit_together)
    again = Sender(stack, directory.endpoint)  # Says it is the same run, and has other weights.
    for tensor in again.model.values():
        tensor.fill_(3)
    again.sender.publish(1)
    before.sender.close()
    group[1].receiver.stage(1)
    with pytest.raises(DigestError, match=r"version 1 is not committed: a on .* has other bytes"):
        group[1].receiver.commit_together(timeout_s=30)
    with pytest.raises(QuorumError, match="failed: b on "):
        first.result(30)
    assert [member.receiver.version for member in group] == [None, None]


def test_a_quorum_of_two_goes_on_without_the_third(stack, directory):
    quorum = Quorum("at_least", 2)
    sender = Sender(stack, directory.endpoint)
    sender.publish(1)
    group = [Receiver(stack, directory.endpoint, group="g") for _ in range(3)]
    wait_until(lambda: len(directory.view.members) == 4)
    pool = stack.enter_context(ThreadPoolExecutor(2))
    group[0].receiver.stage(1)
    first = pool.submit(group[0].receiver.commit_together, quorum)
    time.sleep(0.2)
    assert not first.done()
    assert group[0].receiver.version is None
    group[1].receiver.stage(1)
    assert group[1].receiver.commit_together(quorum, timeout_s=30) == first.result(30) == 1
    assert group[2].receiver.version is None


def test_a_group_that_does_not_come_together_keeps_what_it_has(stack, directory):
    sender = Sender(stack, directory.endpoint)
    sender.publish(1)
    group = [Receiver(stack, directory.endpoint, group="g", name=name) for name in ("a", "b", "c")]
    a, b, c = (member.receiver for member in group)
    wait_until(lambda: len(directory.view.members) == 4)
    a.stage(1)
    words = "version 1 is not committed: no time left waiting for "
    there = f"{re.escape(f'b at {b.endpoint}')}; {re.escape(f'c at {c.endpoint}')}"
    with pytest.raises(DeadlineError, match=f"{words}{there}$"):
        a.commit_together(timeout_s=0.5)
    b.stage(1)
    with pytest.raises(DeadlineError, match=f"{words}a at .*, which gave up waiting; c at [^;]*$"):
        b.commit_together(timeout_s=0.5)
    assert group[0].receiver.version is None
    assert group[0].model["norm"].eq(-1).all()


def committed_together(stack, directory, run_id: str, *, num_votes: int) -> None:
    """Two receivers of one group, so many of which are ready; all of it is gone in the end."""
    with ExitStack() as inner:
        Sender(inner, directory.endpoint, run_id=run_id).publish(1)
        group = [Receiver(inner, directory.endpoint, group="g") for _ in range(2)]
        wait_until(lambda: len(directory.view.members) == 3)
        pool = inner.enter_context(ThreadPoolExecutor(2))
        for member in group[:num_votes]:
            member.receiver.stage(1, timeout_s=30)
        timeout_s = 30.0 if num_votes == 2 else 0.5
        votes = [
            pool.submit(member.receiver.commit_together, timeout_s=timeout_s)
            for member in group[:num_votes]
        ]
        assert [vote.result(60) for vote in votes] == [1] * num_votes
    wait_until(lambda: not directory.view.members)


def test_a_version_of_another_run_is_not_committed_by_the_votes_for_the_one_before(
    stack, directory
):
    committed_together(stack, directory, "one", num_votes=2)
    with pytest.raises(DeadlineError):
        committed_together(stack, directory, "two", num_votes=1)
