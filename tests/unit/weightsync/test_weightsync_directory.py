"""Members that find one another through a directory, over real sockets, in one process."""

import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
from weight_members import Receiver, Sender, wait_until

from cosmos_weightsync import (
    ConfigurationError,
    DeadlineError,
    ProtocolError,
    ReceiverConfig,
    WeightDirectory,
    WeightReceiver,
)
from cosmos_weightsync.attendance import Attendance
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.membership import Member
from cosmos_weightsync.transports import TcpTransport


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
