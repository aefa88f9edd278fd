"""Members that find one another through a directory, over real sockets, in one process."""

import itertools
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import torch

from cosmos_weightsync import (
    ConfigurationError,
    DeadlineError,
    ProtocolError,
    Quorum,
    QuorumError,
    ReceiverConfig,
    SenderConfig,
    WeightDirectory,
    WeightReceiver,
    WeightSender,
    shards_of,
)
from cosmos_weightsync.attendance import Attendance
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.membership import Member
from cosmos_weightsync.transports import TcpTransport

SHAPES = {"embed": (40, 16), "norm": (7,)}


@pytest.fixture
def directory(stack: ExitStack) -> WeightDirectory:
    return stack.enter_context(WeightDirectory(lease_s=1.0))


def model(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


class Sender:
    def __init__(
        self, stack: ExitStack, directory: str, rank=0, num_ranks=1, run_id="run", **more
    ) -> None:
        self.model = model(0.0)
        self.sender = WeightSender(
            shards_of(self.model.items()),
            rank=rank,
            num_ranks=num_ranks,
            config=SenderConfig(directory=directory, run_id=run_id),
            **more,
        )
        stack.enter_context(self.sender)

    def publish(self, version: int) -> None:
        for tensor in self.model.values():
            tensor.fill_(version)
        self.sender.publish(version)


class Receiver:
    def __init__(self, stack: ExitStack, directory: str, **config) -> None:
        self.model = model(-1.0)
        config = {"transport": "tcp", "serve_host": "127.0.0.1", "linger_s": 0.2, **config}
        self.receiver = WeightReceiver(
            wanted=shards_of(self.model.items()),
            config=ReceiverConfig(directory=directory, **config),
        )
        stack.enter_context(self.receiver)

    def update(self, version: int) -> None:
        self.receiver.stage(version, timeout_s=30)
        self.receiver.commit()

    def assert_holds(self, version: int) -> None:
        assert self.receiver.version == version
        assert all(tensor.eq(version).all() for tensor in self.model.values())


def wait_until(is_true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_receiver_finds_the_senders_whoever_comes_first(stack, directory):
    receiver = Receiver(stack, directory.endpoint)
    pool = stack.enter_context(ThreadPoolExecutor(1))
    updated = pool.submit(receiver.update, 1)
    senders = [Sender(stack, directory.endpoint, rank, 2) for rank in range(2)]
    for sender in senders:
        sender.publish(1)
    updated.result(30)
    receiver.assert_holds(1)
    assert [m.role for m in directory.view.members].count("sender") == 2


def test_a_newcomer_gets_the_version_from_a_receiver_when_the_trainer_is_gone(stack, directory):
    sender = Sender(stack, directory.endpoint)
    sender.publish(4)
    first = Receiver(stack, directory.endpoint, name="first")
    first.update(4)
    sender.sender.close()
    newcomer = Receiver(stack, directory.endpoint, name="newcomer")
    newcomer.update(0)
    newcomer.assert_holds(4)


def test_a_trainer_that_starts_again_elsewhere_is_found(stack, directory):
    sender = Sender(stack, directory.endpoint)
    sender.publish(1)
    receiver = Receiver(stack, directory.endpoint)
    receiver.update(1)
    sender.sender.close()
    again = Sender(stack, directory.endpoint)
    again.publish(2)
    receiver.update(2)
    receiver.assert_holds(2)


def test_transfers_outlive_the_directory_and_the_next_one_learns_who_is_there(stack):
    directory = WeightDirectory(lease_s=1.0)
    port = int(directory.endpoint.rpartition(":")[2])
    sender, receiver = Sender(stack, directory.endpoint), Receiver(stack, directory.endpoint)
    sender.publish(1)
    receiver.update(1)
    directory.close()
    sender.publish(2)
    receiver.update(2)
    receiver.assert_holds(2)
    again = stack.enter_context(WeightDirectory(port=port, lease_s=1.0))
    wait_until(lambda: len(again.view.members) == 2)
    wait_until(lambda: {member.version for member in again.view.members} == {2})
    newcomer = Receiver(stack, again.endpoint)
    newcomer.update(2)
    newcomer.assert_holds(2)


class HeldUp:
    """A way to the directory on which the first connection stands still until `go` is set."""

    def __init__(self, stack: ExitStack, directory: str) -> None:
        host, port = directory.removeprefix("tcp://").rsplit(":", 1)
        self._there = (host, int(port))
        self.came, self.go = threading.Event(), threading.Event()
        self._pool = stack.enter_context(ThreadPoolExecutor(16))
        self._server = socket.create_server(("127.0.0.1", 0))
        stack.callback(self._close)
        self.endpoint = directory.replace(f":{port}", f":{self._server.getsockname()[1]}")
        self._pool.submit(self._accept)

    def _close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):  # Closed at the end.
            for number in itertools.count():
                near, _ = self._server.accept()
                self._pool.submit(self._connect, near, number == 0)
                self.came.set()

    def _connect(self, near: socket.socket, waits: bool) -> None:
        with near, socket.create_connection(self._there) as far:
            back = self._pool.submit(self._carry, far, near)
            assert not waits or self.go.wait(60)
            self._carry(near, far)
            back.result(60)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                target.sendall(content)
            target.shutdown(socket.SHUT_WR)


def test_what_a_member_holds_is_told_last_though_its_first_words_come_late(stack, directory):
    held_up = HeldUp(stack, directory.endpoint)
    member = Member(id="me", role="receiver", endpoint="tcp://127.0.0.1:1")
    attendance = Attendance(held_up.endpoint, member, "")
    assert held_up.came.wait(60)
    attendance.hold(7, "run")  # Comes to nothing, or arrives before the registration does.
    held_up.go.set()
    onlooker = Attendance(directory.endpoint, Member(id="other", role="receiver"), "")
    try:
        seen = onlooker.wait_for(
            lambda view: any((m.id, m.version) == ("me", 7) for m in view.members),
            Deadline.after(60.0),
        )
        assert seen is not None
        time.sleep(3.0)  # A renewal: what came late must not have the last word.
        assert [m.version for m in onlooker.view.members if m.id == "me"] == [7]
    finally:
        for each in (attendance, onlooker):
            each.close(Deadline.after(30.0))


def test_the_dead_vanish_with_their_lease(stack, directory):
    Sender(stack, directory.endpoint)
    receiver = Receiver(stack, directory.endpoint)
    wait_until(lambda: len(directory.view.members) == 2)
    receiver.receiver.close()
    wait_until(lambda: len(directory.view.members) == 1)


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


def test_what_makes_no_sense_is_refused(stack, directory):
    with pytest.raises(ConfigurationError, match="beside a directory"):
        WeightReceiver(["127.0.0.1:1"], config=ReceiverConfig(directory=directory.endpoint))
    with pytest.raises(ConfigurationError, match="needs a token"):
        WeightDirectory(bind_host="0.0.0.0")
    alone = stack.enter_context(WeightReceiver(["127.0.0.1:1"]))
    with pytest.raises(ConfigurationError, match="set ReceiverConfig"):
        alone.commit_together()
    with pytest.raises(ConfigurationError, match="serve_host"):
        _ = alone.endpoint


def test_a_directory_that_wants_a_token_is_not_for_strangers(stack):
    directory = stack.enter_context(WeightDirectory(token="secret"))
    receiver = WeightReceiver(
        config=ReceiverConfig(directory=directory.endpoint, connect_timeout_s=0.5)
    )
    stack.enter_context(receiver)
    with pytest.raises((DeadlineError, ProtocolError)):
        receiver.stage(1, timeout_s=1)
    assert directory.view.members == ()


def test_closing_ends_every_thread(stack):
    with ExitStack() as inner:
        directory = inner.enter_context(WeightDirectory())
        Sender(inner, directory.endpoint).publish(1)
        Receiver(inner, directory.endpoint).update(1)
    assert not [t for t in threading.enumerate() if t.name.startswith("weight-")]


class Counting(TcpTransport):
    """TCP that counts the bytes sent."""

    num_bytes = 0

    def prepare(self, side, host):
        return _CountingPending(self, super().prepare(side, host))


class _CountingPending:
    def __init__(self, counting, pending) -> None:
        self._counting, self._pending = counting, pending
        self.description, self.close = pending.description, pending.close

    def connect(self, peer, deadline):
        return _CountingChannel(self._counting, self._pending.connect(peer, deadline))


class _CountingChannel:
    def __init__(self, counting, channel) -> None:
        self._counting, self._channel = counting, channel
        self.device, self.capabilities = channel.device, channel.capabilities
        self.close = channel.close

    def send(self, view, deadline) -> None:
        self._counting.num_bytes += view.numel()
        self._channel.send(view, deadline)


def test_a_planned_group_takes_each_byte_across_once_and_passes_it_on(stack, directory):
    """Three receivers of one host far from the sender: it sends the model once, not thrice."""
    counting = Counting()
    sender = Sender(stack, directory.endpoint, transports=[counting])
    config = {"prefer": "planned", "host": "far away", "group": "g"}
    group = [Receiver(stack, directory.endpoint, name=f"r{i}", **config) for i in range(3)]
    pool = stack.enter_context(ThreadPoolExecutor(3))
    sender.publish(1)
    for member in group:  # Who has never fetched is not known yet, and fetches alone.
        member.update(1)
    wait_until(lambda: [m.version for m in directory.view.members].count(1) == 4)
    time.sleep(1.0)  # Everybody has heard of everybody.
    sender.publish(2)
    counting.num_bytes = 0
    for update in [pool.submit(member.update, 2) for member in group]:
        update.result(60)
    for member in group:
        member.assert_holds(2)
    total = sum(tensor.nbytes for tensor in sender.model.values())
    assert total <= counting.num_bytes < 1.2 * total


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
