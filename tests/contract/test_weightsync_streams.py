"""Rows over TCP, where either end may or may not have the compiled library."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cosmos_weightsync import DeadlineError, PeerLostError
from cosmos_weightsync.checksums import RunningChecksum, tensor_checksum
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.streaming import PlainRows
from cosmos_weightsync.transports import Channel, StreamChannel, TcpTransport, Transport

HOST = "127.0.0.1"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def soon(seconds: float = 30.0) -> Deadline:
    return Deadline.after(seconds)


def content(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


@pytest.fixture(params=["compiled", "plain"])
def receives(request: pytest.FixtureRequest) -> Transport:
    return TcpTransport(PlainRows()) if request.param == "plain" else TcpTransport()


@pytest.fixture(params=["compiled", "plain"])
def streams(
    request: pytest.FixtureRequest, receives: Transport, pool: ThreadPoolExecutor
) -> Iterator[tuple[Channel, Channel]]:
    """(sender's end, receiver's end) of TCP, each with or without the compiled library."""
    sends = TcpTransport(PlainRows()) if request.param == "plain" else TcpTransport()
    sender, receiver = sends.prepare("sender", HOST), receives.prepare("receiver", HOST)
    accepted = pool.submit(sender.connect, receiver.description, soon())
    receiving = receiver.connect(sender.description, soon())
    sending = accepted.result()
    yield sending, receiving
    sending.close()
    receiving.close()


def test_rows_travel_as_the_message_that_they_are(streams, pool):
    sending, receiving = streams
    assert isinstance(sending, StreamChannel)
    assert isinstance(receiving, StreamChannel)
    columns = content(3000 * 1000, 1).view(3000, 1000)[:, 100:900]
    text = columns.contiguous().view(-1)
    whole = RunningChecksum(2 * text.numel())
    arrived = torch.zeros(3 * text.numel(), dtype=torch.uint8)
    first, second, third = arrived.chunk(3)

    def send() -> None:
        sending.send_rows(columns.numpy(), soon())
        sending.send(text, soon())
        sending.send_rows(columns.numpy(), soon())

    sent = pool.submit(send)
    receiving.recv_hashed(first.numpy(), whole, soon())
    receiving.recv_hashed(second.numpy(), whole, soon())
    receiving.recv_into(third, soon())
    sent.result()
    assert torch.equal(arrived, text.repeat(3))
    assert whole.value == tensor_checksum(arrived[: 2 * text.numel()])


def test_either_end_may_move_many_messages_in_a_call(streams, pool):
    sending, receiving = streams
    sent = [content(size, size).view(-1, 500) for size in (500, 40_000, 1_000_000)]
    places = [torch.zeros(each.numel(), dtype=torch.uint8) for each in sent]
    sums = [RunningChecksum(each.numel()) for each in sent]

    def send() -> None:
        if sending.compiled is not None:
            rows = [each.numpy() for each in sent]
            sending.send_moves(sending.compiled.prepare_send(rows), soon())
        else:
            for each in sent:
                sending.send_rows(each.numpy(), soon())

    sends = pool.submit(send)
    if receiving.compiled is not None:
        moves = receiving.compiled.prepare_receive([place.numpy() for place in places])
        values = receiving.recv_moves(moves, soon())
    else:
        for place, running in zip(places, sums, strict=True):
            receiving.recv_hashed(place.numpy(), running, soon())
        values = [running.value for running in sums]
    sends.result()
    assert values == [tensor_checksum(each) for each in sent]
    assert all(torch.equal(p, s.flatten()) for p, s in zip(places, sent, strict=True))


def test_a_receiver_that_waits_in_many_messages_is_woken(streams, pool):
    receiving = streams[1]
    if receiving.compiled is None:
        return  # This end receives one by one; see the next test.
    places = [torch.zeros(1000, dtype=torch.uint8).numpy()] * 2
    moves = receiving.compiled.prepare_receive(places)
    with pytest.raises(DeadlineError):
        receiving.recv_moves(moves, soon(0.2))
    waits = pool.submit(receiving.recv_moves, moves, soon())
    time.sleep(0.05)
    receiving.close()
    with pytest.raises(PeerLostError):
        waits.result(timeout=30)


def test_a_receiver_that_waits_in_a_stream_is_woken(streams, pool):
    receiving, into = streams[1], torch.zeros(1000, dtype=torch.uint8).numpy()
    with pytest.raises(DeadlineError):
        receiving.recv_hashed(into, RunningChecksum(1000), soon(0.2))
    waits = pool.submit(receiving.recv_hashed, into, RunningChecksum(1000), soon())
    time.sleep(0.05)
    receiving.close()
    with pytest.raises(PeerLostError):
        waits.result(timeout=30)


def test_a_sender_learns_that_nobody_takes_its_rows(streams, pool):
    sending, receiving = streams
    rows = torch.zeros(64, 1 << 20, dtype=torch.uint8)  # More than all buffers.
    sends = pool.submit(sending.send_rows, rows.numpy(), soon(120))
    receiving.recv_hashed(rows[0].clone().numpy(), RunningChecksum(1 << 20), soon())
    receiving.close()
    with pytest.raises(PeerLostError):
        sends.result(timeout=60)
