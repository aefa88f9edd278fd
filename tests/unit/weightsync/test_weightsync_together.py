"""Messages over gloo that lie in place are waited for together, unless somebody waits for each."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, pairwise

import pytest
import torch

from cosmos_weightsync import Box, Piece
from cosmos_weightsync.buckets import BucketPool
from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.edges import pull_edge, serve_edge
from cosmos_weightsync.transports import BatchedChannel, Capabilities, ProcessGroupTransport

NUM_PIECES = 40
ELEMENTS = 512 << 10  # Of one byte: they travel in place.


@dataclass
class Watched:
    """A real end that notes which message is waited for, and takes its time if it is to."""

    real: BatchedChannel
    seen: list[tuple[str, int]]
    slowness_s: float = 0.0
    begun: int = 0

    @property
    def capabilities(self) -> Capabilities:
        return self.real.capabilities

    @property
    def device(self) -> torch.device:
        return self.real.device

    def send(self, view: torch.Tensor, deadline: Deadline) -> None:
        self.begin_send(view, deadline)()

    def recv_into(self, view: torch.Tensor, deadline: Deadline) -> None:
        self.begin_recv(view, deadline)()

    def begin_send(self, view: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        return self._noted(self.real.begin_send(view, deadline))

    def begin_recv(self, view: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        return self._noted(self.real.begin_recv(view, deadline))

    def close(self) -> None:
        self.real.close()

    def _noted(self, wait: Callable[[], None]) -> Callable[[], None]:
        number = self.begun
        self.begun += 1

        def noted() -> None:
            self.seen.append(("waited", number))
            wait()
            time.sleep(self.slowness_s)

        return noted


def moved(
    *, is_awaited: bool, slowness_s: float = 0.0
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """What the sender and the receiver of an edge did, in order."""
    box = Box.full((ELEMENTS,))
    names = [f"layer.{number}" for number in range(NUM_PIECES)]
    pieces = [Piece(name, box, 0, 0, ELEMENTS) for name in names]
    source = [torch.full((ELEMENTS,), number, dtype=torch.uint8) for number in range(NUM_PIECES)]
    target = [torch.zeros(ELEMENTS, dtype=torch.uint8) for _ in names]
    there: list[tuple[str, int]] = []
    here: list[tuple[str, int]] = []

    def note(regions: Sequence[tuple[str, Box]], num_bytes: int) -> bool:
        assert num_bytes == ELEMENTS
        here.extend(("arrived", names.index(name)) for name, _ in regions)
        return is_awaited

    held = HeldBoxes((name, box, tensor) for name, tensor in zip(names, source, strict=True))
    arriving = HeldBoxes(
        ((name, box, tensor) for name, tensor in zip(names, target, strict=True)), on_arrival=note
    )
    transport, deadline = ProcessGroupTransport(), Deadline.after(60)
    sender, receiver = (transport.prepare(side, "127.0.0.1") for side in ("sender", "receiver"))
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(sender.connect, receiver.description, deadline)
        receiving = receiver.connect(sender.description, deadline)
        sending = Watched(accepted.result(), there)
        serving = pool.submit(
            serve_edge, sending, pieces, held, BucketPool(1 << 21), deadline, bucket_bytes=1 << 21
        )
        watched = Watched(receiving, here, slowness_s)
        arrived = pull_edge(
            watched, pieces, arriving, BucketPool(1 << 21), deadline, bucket_bytes=1 << 21
        )
        assert arrived == serving.result()
    assert all(torch.equal(*pair) for pair in zip(source, target, strict=True))
    sending.close()
    watched.close()
    return there, here


def test_a_sender_waits_for_the_last_of_all_it_has_begun():
    there, _ = moved(is_awaited=False)
    assert there == [("waited", number) for number in reversed(range(NUM_PIECES))]


def test_a_receiver_waits_for_several_while_they_arrive_fast():
    _, here = moved(is_awaited=False)
    turns = [(what, [n for _, n in group]) for what, group in groupby(here, lambda each: each[0])]
    waited, arrived = turns[::2], turns[1::2]
    assert [number for _, numbers in arrived for number in numbers] == list(range(NUM_PIECES))
    assert [numbers[::-1] for _, numbers in waited] == [numbers for _, numbers in arrived]
    sizes = [len(numbers) for _, numbers in waited]
    assert sizes[0] == 1
    assert 2 < max(sizes) <= 16
    assert all(after <= 2 * before for before, after in pairwise(sizes))


@pytest.mark.parametrize(("is_awaited", "slowness_s"), [(True, 0.0), (False, 0.06)])
def test_messages_are_taken_one_by_one_where_each_is_passed_on_or_slow(is_awaited, slowness_s):
    _, here = moved(is_awaited=is_awaited, slowness_s=slowness_s)
    one_by_one = [(what, number) for number in range(NUM_PIECES) for what in ("waited", "arrived")]
    assert here == one_by_one
